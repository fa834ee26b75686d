"""Data, checkpoints and evaluations as people write them; see `manifests_as_written`."""

from __future__ import annotations

from tests.unit.controller.manifests_as_written import SCHEMA

STORE = "checkpoint: {uri: 's3://bucket/of-a-job', secretRef: {name: store}}"
EPISODES = "method: {type: rl, parameters: {environment: guessing, rollouts: server}}\ndata:"
SCORED = "data:\nroles: {trainer: null, sampler: {gpus: 1}}"
WORK = [
    (
        "data-of-two-places",
        "data: {name: pig_latin, pvc: corpus/train.jsonl}",
        "Failed",
        r"spec\.data takes one of name, configMapRef and pvc",
    ),
    (
        "data-of-a-claim-without-a-path",
        "data: {pvc: corpus}",
        "Failed",
        r"spec\.data\.pvc must be claim/path",
    ),
    (
        "judge-that-no-sampler-of-the-job-serves",
        "method: {type: rl, maxSteps: 2, parameters: {judge: wise, data: arithmetic}}\ndata:\n"
        "roles: {sampler: {gpus: 1}}",
        "Failed",
        r"parameters\.judge is 'wise', and the samplers of the job serve",
    ),
    (
        "judge-beside-a-reward",
        "method: {type: rl, maxSteps: 2, parameters: {judge: a/b, reward: 'a.py:b'}}\ndata:\n"
        "roles: {sampler: {gpus: 1}}",
        "Failed",
        r"reward and judge are both given",
    ),
    (
        "checkpoint-to-begin-with-that-is-a-path",
        "checkpoint: {resumeFrom: ./checkpoints/final}",
        "Failed",
        r"resumeFrom is '\./checkpoints/final'; give projects/PROJECT/",
    ),
    (
        "checkpoint-to-begin-with",
        "checkpoint: {resumeFrom: lora-sft/greetings-v1}",
        "Running",
        "",
    ),
    (
        "checkpoint-to-serve-that-is-a-path",
        "method: {type: serve}\ndata:\nserve: {checkpoint: ./final}\n"
        "roles: {trainer: null, sampler: {gpus: 1}}",
        "Failed",
        r"serve\.checkpoint is '\./final'; give ",
    ),
    (
        "scenario-of-all-weights-with-an-adapter",
        "method: {type: rl, parameters: {scenario: math}}\ndata:\nroles: {sampler: {gpus: 1}}",
        "Failed",
        r"spec\.adapter\.type is 'lora', and the scenario has 'full'; set spec\.adapter\.type",
    ),
    (
        "data-of-the-store-of-a-job",
        "data: {name: 's3://bucket/data/train.jsonl'}\n" + STORE,
        "Running",
        "",
    ),
    (
        "data-of-a-store-without-keys",
        "data: {name: 's3://bucket/data/train.jsonl'}",
        "Failed",
        r"set spec\.checkpoint\.uri and spec\.checkpoint\.secretRef",
    ),
    (
        "data-of-a-store-to-serve",
        "method: {type: serve}\nroles: {trainer: null, sampler: {gpus: 1}}\n"
        "data: {name: 's3://bucket/data/train.jsonl'}\n" + STORE,
        "Failed",
        r"method serve reads no data; drop spec\.data",
    ),
    (
        "data-of-a-store-with-settings-of-its-own",
        "data: {name: 's3://bucket/train.jsonl?endpoint=http://s3'}\n" + STORE,
        "Failed",
        r"give s3://bucket/path of one object, whose store has its settings from spec\.checkpoint",
    ),
    (
        "data-that-is-a-bucket",
        "data: {name: 's3://bucket/'}\n" + STORE,
        "Failed",
        r"spec\.data\.name is 's3://bucket/'; give s3://bucket/path of one object",
    ),
    *(
        (
            f"data-that-leads-elsewhere-{number}",
            f"data: {{name: 's3://bucket/{path}'}}\n" + STORE,
            "Failed",
            "give s3://bucket/path of one object",
        )
        for number, path in enumerate(
            ("../a", "a/..", "%2e%2e/a", "a/%2E%2e", "a%2Fb", "a%00b", "a//b", "a" * 256)
        )
    ),
    (
        "data-with-settings-behind-a-fragment",
        "data: {name: 's3://bucket/train.jsonl'}\n"
        "checkpoint: {uri: 's3://bucket/a#?credentials=instance', secretRef: {name: store}}",
        "Failed",
        r"spec\.checkpoint\.uri has a #",
    ),
    (
        "environments-of-a-job-that-no-coordinator-reaches",
        f"{EPISODES}\nroles: {{sampler: {{gpus: 1}}, environment: {{}}}}",
        "Failed",
        r"rollouts is server, and the shared coordinator does not reach .*add `coordinator: \{\}`",
    ),
    (
        "environments-of-a-job-with-a-coordinator",
        f"{EPISODES}\nroles: {{sampler: {{gpus: 1}}, environment: {{}}, coordinator: {{}}}}",
        "Running",
        "",
    ),
    (
        "environments-that-all-share",
        f"{EPISODES}\nroles: {{sampler: {{gpus: 1}}}}",
        "Running",
        "",
    ),
    (
        "environments-of-a-job-that-its-driver-plays",
        "method: {type: rl, parameters: {environment: guessing}}\ndata:\n"
        "roles: {sampler: {gpus: 1}, environment: {}}",
        "Running",
        "",
    ),
    ("evaluation", "method: {type: evaluate}\n" + SCORED, "Running", ""),
    (
        "evaluation-of-checkpoints",
        "method: {type: evaluate, parameters: {base_model: qwen3-0.6b, checkpoint: 'a/b, c/d'}}\n"
        + SCORED,
        "Running",
        "",
    ),
    (
        "evaluation-of-a-path",
        "method: {type: evaluate, parameters: {checkpoint: 'a/b,./final'}}\n" + SCORED,
        "Failed",
        r"spec\.method\.parameters\.checkpoint is '\./final'; give projects/PROJECT/",
    ),
    (
        "evaluation-with-a-trainer",
        "method: {type: evaluate}\ndata:\nroles: {sampler: {gpus: 1}}",
        "Failed",
        r"evaluate has no trainer and no agents; drop trainer from spec\.roles",
    ),
    (
        "evaluation-of-steps",
        "method: {type: evaluate, maxSteps: 10}\n" + SCORED,
        "Failed",
        r"spec\.method\.maxSteps is set, and method evaluate trains nothing; leave it out",
    ),
    (
        "environments-of-a-method-that-plays-nothing",
        "roles: {environment: {}, coordinator: {}, agents: [{name: a}]}",
        "Failed",
        r"method supervised plays nothing; drop environment, coordinator, agents from spec\.roles",
    ),
    (
        "environments-for-evaluators-of-ones-own",
        "method: {type: supervised, parameters: {evaluators: 'mine.py:play'}}\n"
        "roles: {environment: {}, sampler: {gpus: 1}}",
        "Running",
        "",
    ),
    (
        "rank-of-all-weights",
        "adapter: {type: full, rank: 8}",
        "Failed",
        r"spec\.adapter\.rank is 8, and type full trains all weights; drop it",
    ),
    (
        "checkpoint-to-serve-of-a-training",
        "serve: {checkpoint: projects/p/trainingRuns/r/checkpoints/c}",
        "Failed",
        r"spec\.serve is of method serve, and spec\.method\.type is supervised; drop one",
    ),
    (
        "cache-of-a-hub-for-a-claim",
        "model: {name: a, source: 'pvc://models/a', cacheClaimName: cache}",
        "Failed",
        r"cacheClaimName keeps what comes from a hub, and spec\.model\.source is 'pvc://models/a'",
    ),
    (
        "key-of-a-hub-for-nothing",
        "model: {name: a, source: 'pvc://models/a', hubTokenSecretRef: {name: hub}}",
        "Failed",
        r"neither spec\.model\.source nor the data is of one; drop it",
    ),
    (
        "key-of-a-hub-for-the-data",
        "model: {name: a, source: 'pvc://models/a', hubTokenSecretRef: {name: hub}}\n"
        "method: {type: rl}\ndata: {name: 'hf://openai/gsm8k:main'}\nroles: {sampler: {gpus: 1}}",
        "Running",
        "",
    ),
    (
        "model-by-the-address-of-its-page",
        "model: {name: a, source: 'https://huggingface.co/Qwen/Qwen3-0.6B'}",
        SCHEMA,
        "does not match",
    ),
    (
        "data-of-the-web",
        "data: {name: 'https://example.com/a.jsonl'}",
        "Failed",
        r"is no file of the driver's pod; give spec\.data\.configMapRef",
    ),
    (
        "setting-with-a-near-name",
        "method: {type: supervised, parameters: {learning_rat: 0.1}}",
        "Failed",
        r"no setting spec\.method\.parameters\.learning_rat; did you mean learning_rate",
    ),
    (
        "steps-among-the-settings",
        "method: {type: supervised, parameters: {num_steps: 5}}",
        "Failed",
        r"spec\.method\.parameters\.num_steps is set by spec\.method\.maxSteps; leave it out",
    ),
    ("kind-of-an-adapter", "adapter: {type: qlora}", SCHEMA, "'qlora' is not one of"),
    (
        "rank-by-the-name-of-peft",
        "adapter: {r: 8, lora_alpha: 16}",
        "Failed",
        r"spec\.adapter\.r is not a field \(it is rank\)",
    ),
]
