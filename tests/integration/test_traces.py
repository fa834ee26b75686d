"""One step of reinforcement learning is one trace, through every service that had a part in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment, embedded_server
from tests.support.wait import until

import tinsmith
from tinsmith.rollouts import EnvironmentTask, GroupConfig, RolloutConfig
from tinsmith.tracing import spans
from tinsmith.tracing.recorder import OpenTelemetryRecorder

_CANARY = "canaryquokka"
_SERVICES = {"client", "gateway", "scheduler", "trainer", "sampler", "coordinator", "environment"}
_DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)


@dataclass
class Traced:
    """A deployment whose spans are kept."""

    deployment: Deployment
    exporter: InMemorySpanExporter

    def ended(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def find(self, name: str) -> ReadableSpan:
        """Return the first span of a name that has ended, once there is one."""
        return until(lambda: next((span for span in self.ended() if span.name == name), None))

    def tree(self, root: ReadableSpan, *names: str) -> dict[int, ReadableSpan]:
        """Return the spans of a trace by id, once all have ended, some names among them."""

        def look() -> dict[int, ReadableSpan] | None:
            found = {
                span.context.span_id: span
                for span in self.ended()
                if span.context.trace_id == root.context.trace_id
            }
            above = {span.parent.span_id for span in found.values() if span.parent is not None}
            is_whole = above <= found.keys()
            is_there = set(names) <= {span.name for span in found.values()}
            return found if is_whole and is_there else None

        return until(look)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model_dir: object) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    spans.install(OpenTelemetryRecorder(SimpleSpanProcessor(exporter)))
    try:
        with embedded_server(tmp_path_factory.mktemp("traced"), model_dir) as deployment:
            yield Traced(deployment, exporter)
    finally:
        spans.install(None)


def take_step(client: tinsmith.Client) -> None:
    """Play episodes on the server and train on a batch, within one span."""
    with spans.block("step", begins=True):
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        rollouts = client.rollouts.generate(
            "guessing",
            [EnvironmentTask(3)],
            sampler=run.sampler(),
            config=RolloutConfig(max_turns=2, max_tokens_per_turn=4),
            params=tinsmith.SamplingParams(seed=1),
            groups=GroupConfig(group_size=2),
            batch_key="traced",
        )
        rollouts.result()
        gradient = run.forward_backward([_DATUM])
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
        gradient.result()


def service_of(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.name"]).removeprefix("tinsmith-")


def path_to(span: ReadableSpan, by_id: dict[int, ReadableSpan]) -> list[tuple[str, str]]:
    """Return service and name of a span and of what it is a part of, the root last."""
    path = [(service_of(span), span.name)]
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        path.append((service_of(span), span.name))
    return path


def test_a_step_is_one_tree_of_all_services(traced: Traced) -> None:
    with traced.deployment.client() as client:
        take_step(client)
    step = traced.find("step")
    names = ("forward_backward", "optim_step", "play episode", "decode", "environment step")
    tree = traced.tree(step, *names, "place run")
    assert {service_of(span) for span in tree.values()} == _SERVICES
    assert [span for span in tree.values() if span.parent is None] == [step]

    def path(name: str) -> list[tuple[str, str]]:
        return path_to(next(span for span in tree.values() if span.name == name), tree)

    create, train, play = (
        f"tinsmith.v1.{method}"
        for method in (
            "SchedulerService/CreateTrainingRun",
            "TrainerService/ForwardBackward",
            "CoordinatorService/GenerateRollouts",
        )
    )
    root = ("client", "step")
    through_gateway = [("gateway", create), ("gateway", create), ("client", create)]
    assert path("place run") == [
        ("scheduler", "place run"),
        ("scheduler", create),
        *through_gateway,
        root,
    ]
    assert path("forward_backward") == [
        ("trainer", "forward_backward"),
        ("trainer", train),
        ("client", train),
        root,
    ]
    played = [("coordinator", "play episode"), ("coordinator", play), ("client", play), root]
    assert path("play episode") == played
    sample = "tinsmith.v1.SamplerService/Sample"
    assert path("decode") == [
        ("sampler", "decode"),
        ("sampler", f"sample {BASE_MODEL}"),
        ("sampler", sample),
        ("coordinator", sample),
        *played,
    ]
    make = "tinsmith.v1.EnvironmentService/CreateInstance"
    assert path("environment step") == [
        ("environment", "environment step"),
        ("environment", make),
        ("coordinator", make),
        *played,
    ]


def _all_of(wanted: set[int], ended: list[ReadableSpan]) -> list[ReadableSpan]:
    found = [each for each in ended if each.context.span_id in wanted]
    return found if len(found) == len(wanted) else []


def test_a_cycle_is_linked_with_the_operations_that_it_serves(traced: Traced) -> None:
    with traced.deployment.client() as client:
        take_step(client)
    cycle = traced.find("cycle")
    served = {link.context.span_id for link in cycle.links}
    assert served
    operations = until(lambda: _all_of(served, traced.ended()))
    assert {service_of(each) for each in operations} == {"trainer"}
    assert cycle.parent is None
    for operation in operations:
        parts = [
            each
            for each in traced.ended()
            if each.parent is not None and each.parent.span_id == operation.context.span_id
        ]
        assert {each.name for each in parts} == {"wait in the queue", "compute", "commit"}
        computed = next(each for each in parts if each.name == "compute")
        assert computed.links[0].context.span_id in {
            each.context.span_id for each in traced.ended() if each.name == "cycle"
        }
        # Its callers are told as soon as it is durable, before the commit of its cycle is over.
        for each in parts:
            assert operation.start_time <= each.start_time <= operation.end_time


def test_a_metric_of_a_call_names_a_trace(traced: Traced) -> None:
    with traced.deployment.client() as client:
        take_step(client)
    page = generate_latest(REGISTRY).decode()
    calls = [line for line in page.splitlines() if line.startswith("tinsmith_rpc_duration")]
    named = {line.split('trace_id="')[1][:32] for line in calls if 'trace_id="' in line}
    assert named & {f"{span.context.trace_id:032x}" for span in traced.ended()}


def test_sampling_over_http_begins_a_trace_with_names_of_the_conventions(traced: Traced) -> None:
    with openai.OpenAI(
        base_url=f"http://{traced.deployment.address}/v1",
        api_key=traced.deployment.api_key,
        timeout=TIMEOUT_S,
    ) as model:
        answer = model.chat.completions.create(
            model=BASE_MODEL,
            messages=[{"role": "user", "content": _CANARY}],
            max_tokens=5,
            temperature=0.0,
        )
    asked = traced.find("POST /v1/chat/completions")
    assert asked.parent is None
    sampled = until(
        lambda: next(
            (
                span
                for span in traced.ended()
                if span.name == f"sample {BASE_MODEL}"
                and span.context.trace_id == asked.context.trace_id
            ),
            None,
        )
    )
    attributes = dict(sampled.attributes or {})
    assert attributes["gen_ai.request.model"] == BASE_MODEL
    assert attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    said = [
        (span.name, dict(span.attributes or {}), span.status.description, span.events)
        for span in traced.ended()
    ]
    text = str(said)
    assert _CANARY not in text
    assert traced.deployment.api_key not in text
    assert (answer.choices[0].message.content or _CANARY) not in text


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, tinsmith, tinsmith_local.embedded, tinsmith_controller.config\n"
        "tinsmith.Client\n"
        "from tinsmith.tracing import switch, spans\n"
        "switch.start({})\n"
        "assert not spans.is_on()\n"
        "found = [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
