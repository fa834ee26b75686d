"""The small size of `python -m tests.determinism`, against servers of this repository.

Few adapters fit into the sampler, and few sequences into its cache. Weights go out of memory and
come back, and sequences give their blocks up to others and are read again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from prometheus_client import REGISTRY
from tests.determinism.__main__ import connected, main, parser
from tests.determinism.native_target import NativeTarget
from tests.determinism.openai_target import OpenAITarget
from tests.determinism.passes import Report, hold
from tests.determinism.plan import Size, make_plan
from tests.determinism.target import Target
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment, embedded_server
from tests.integration.tinker_users import collected as collected
from tests.integration.tinker_users import key_of, url_of

from tinsmith_local.made_models import make_model

# Both SDKs leave connections open until they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)

NUM_ADAPTERS = 8
MAX_LOADED = 3
CACHE_BLOCKS = 12


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Deployment]:
    block_bytes = 64 * 2 * 2 * 2 * 16 * 4
    sampler = {
        "max_loaded_weights": MAX_LOADED,
        "cache_bytes": CACHE_BLOCKS * block_bytes,
        "max_concurrent_sequences": 16,
    }
    with embedded_server(
        tmp_path_factory.mktemp("reading"), model_dir, sampler=sampler
    ) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("seeing")
    sampler: dict[str, object] = {"max_loaded_weights": MAX_LOADED}
    with embedded_server(folder, make_model("tiny-vl", folder), sampler=sampler) as deployment:
        yield deployment


@asynccontextmanager
async def target_of(deployment: Deployment, protocol: str) -> AsyncIterator[Target]:
    if protocol == "openai":
        async with (
            deployment.client() as client,
            openai.AsyncOpenAI(
                base_url=f"{url_of(deployment)}/v1", api_key=deployment.api_key, timeout=TIMEOUT_S
            ) as chat,
        ):
            yield OpenAITarget(chat, NativeTarget(client, BASE_MODEL).publish)
        return
    options = parser().parse_args(arguments(deployment, protocol))
    async with connected(options) as target:
        yield target


def arguments(deployment: Deployment, protocol: str, **more: int) -> list[str]:
    key = key_of(deployment) if protocol == "tinker" else deployment.api_key
    return [
        *("--base-url", url_of(deployment), "--key", key, "--protocol", protocol),
        *("--model", BASE_MODEL, "--timeout", str(TIMEOUT_S)),
        *(f"--{name}={value}" for name, value in more.items()),
    ]


async def held(deployment: Deployment, protocol: str, size: Size) -> Report:
    async with target_of(deployment, protocol) as target:
        return await hold(target, make_plan(size, 1), concurrency=24, timeout_s=TIMEOUT_S)


def num_loads() -> float:
    found = [
        sample.value
        for family in REGISTRY.collect()
        if family.name == "tinsmith_sampler_weight_loads"
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    return sum(found)


@pytest.mark.parametrize(
    ("protocol", "num_samples"), [("native", 150), ("tinker", 60), ("openai", 60)]
)
async def test_what_is_sampled_at_once_has_the_bits_of_what_is_sampled_alone(
    reading: Deployment, protocol: str, num_samples: int
) -> None:
    loads = num_loads()
    size = Size(num_samples=num_samples, num_adapters=NUM_ADAPTERS, num_publishes=NUM_ADAPTERS)
    report = await held(reading, protocol, size)
    assert report.is_met, report.first_failure or report.first_difference
    assert report.num_samples == num_samples
    assert report.num_published == 2 * NUM_ADAPTERS
    assert report.num_given_up > 0
    # Each version was read more than once, because others had taken its place.
    assert num_loads() - loads > 2 * report.num_published


@pytest.mark.parametrize("protocol", ["native", "tinker", "openai"])
async def test_so_have_samples_behind_pictures(seeing: Deployment, protocol: str) -> None:
    size = Size(num_samples=20, num_adapters=4, num_publishes=2, images=True)
    report = await held(seeing, protocol, size)
    assert report.is_met, report.first_failure or report.first_difference
    assert report.num_samples == 20


def test_the_program_says_that_no_sample_differs(
    reading: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(reading, "native", samples=20, adapters=2)) == 0
    said = capsys.readouterr().out
    assert said.endswith("0 of 20 samples differ, and the scores of 0 prompts\n")
    assert said.startswith("4 versions published")


def test_what_fails_is_counted_and_is_no_success(
    reading: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = arguments(reading, "native", samples=4, adapters=1)
    wrong[wrong.index(BASE_MODEL)] = "absent"
    assert main(wrong) == 1
    said = capsys.readouterr().out
    assert "FAILED; first: Publish(adapter=0, version=0) failed: NotFoundError" in said
