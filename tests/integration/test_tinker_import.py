"""One program text, with `tinker` over the gateway and with `tinsmith as tinker` natively.

Only the import differs. Losses, log-probabilities and samples by seed are the same numbers: both
ways reach the same engine, and the SDKs agree on names, order and defaults.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.integration.servers import BASE_MODEL, Deployment
from tests.integration.tinker_users import key_of, url_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:unclosed:ResourceWarning",
    # Calls that `tinker` is about to move to another class.
    "ignore:DEPRECATED:FutureWarning",
)

PROGRAM = """
import asyncio
import {package} as tinker
from {package} import types

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
found = {{}}

service = tinker.ServiceClient(user_metadata={{"team": "a"}})
found["models"] = [m.model_name for m in service.get_server_capabilities().supported_models]
model = service.create_lora_training_client("{model}", rank=8, seed=3).result()
info = model.get_info()
found["info"] = (info.model_data.model_name, info.is_lora, info.lora_rank)

datum = types.Datum(
    model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=TOKENS[:-1])]),
    loss_fn_inputs={{
        "target_tokens": types.TensorData(data=TOKENS[1:], dtype="int64", shape=[7]),
        "weights": types.TensorData(data=[1.0] * 7, dtype="float32", shape=[7]),
    }},
)
found["losses"] = []
for _ in range(3):
    gradient = model.forward_backward([datum] * 2, "cross_entropy")
    update = model.optim_step(types.AdamParams(learning_rate=1e-2))
    output = gradient.result(timeout=60)
    update.result(timeout=60)
    found["losses"].append(output.metrics["loss:sum"])
    found["logprobs"] = output.loss_fn_outputs[1]["logprobs"].tolist()


def custom(data, logprobs):
    weights = data[0].loss_fn_inputs["weights"].to_torch()
    loss = -(logprobs[0] * weights).sum()
    return loss, {{"mine": loss.item()}}


found["custom"] = model.forward_backward_custom([datum], custom).result().metrics["mine"]
model.optim_step(types.AdamParams()).result()


async def in_a_loop():
    future = await model.forward_backward_async([datum], "importance_sampling_is_no_loss")
    try:
        await future
    except Exception as error:
        found["refused"] = True
    future = await model.forward_async([datum], loss_fn="cross_entropy")
    return (await future.result_async()).metrics["loss:sum"]


found["forward"] = asyncio.run(in_a_loop())

state = model.save_state("state").result().path
weights = model.save_weights_for_sampler(name="weights", ttl_seconds=3600).result().path
again = service.create_training_client_from_state_with_optimizer(state).result()
found["again"] = again.forward([datum], "cross_entropy").result().metrics["loss:sum"]
fresh = service.create_training_client_from_state(state).result()
fresh.load_state(state).result()
found["fresh"] = fresh.forward([datum], "cross_entropy").result().metrics["loss:sum"]

prompt = types.ModelInput.from_ints(TOKENS[:4]).append_int(TOKENS[4])
found["length"] = prompt.length
params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=11)
samplers = [
    service.create_sampling_client(weights).result(),
    service.create_sampling_client(model_path=weights).result(),
    service.create_sampling_client(base_model="{model}").result(),
    model.save_weights_and_get_sampling_client().result(),
]
found["samples"] = []
for sampler in samplers:
    answer = sampler.sample(prompt, 2, params, True, 3).result()
    found["samples"].append(
        [(s.tokens, s.logprobs, str(s.stop_reason)) for s in answer.sequences]
    )
    found["samples"].append((answer.prompt_logprobs, answer.topk_prompt_logprobs))
    found["samples"].append(sampler.compute_logprobs(prompt).result())
answer = asyncio.run(samplers[0].sample_async(prompt=prompt, num_samples=1, sampling_params=params))
found["async"] = answer.sequences[0].tokens
found["text"] = model.get_tokenizer().decode(answer.sequences[0].tokens)
"""


def ran(package: str) -> dict[str, Any]:
    """Return what the program found with a package under the name `tinker`."""
    scope: dict[str, Any] = {}
    text = PROGRAM.format(package=package, model=BASE_MODEL)
    exec(compile(text, f"<program with {package}>", "exec"), scope)
    scope["service"].__exit__(None, None, None)
    found: dict[str, Any] = scope["found"]
    return found


def test_a_program_for_tinker_moves_over_by_its_import(
    embedded: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", url_of(embedded))
    monkeypatch.setenv("TINKER_API_KEY", key_of(embedded))
    monkeypatch.setenv("TINSMITH_ADDRESS", url_of(embedded))
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    over_the_wire, natively = ran("tinker"), ran("tinsmith")
    assert natively.keys() == over_the_wire.keys()
    for name, value in over_the_wire.items():
        assert natively[name] == value, name
    assert all(map(math.isfinite, natively["losses"]))
    assert natively["losses"][-1] < natively["losses"][0]
