"""`python -m tests.determinism`: whether a server gives the same bits whatever else it does.

    python -m tests.determinism --base-url http://127.0.0.1:7077 --key tsk_... --model tiny
    python -m tests.determinism --base-url http://127.0.0.1:8000/v1 --protocol openai \
        --model base --model adapter-1 --model adapter-2 --images

What it demands: a request that names its weights and a seed has one answer. Tokens, their
log-probabilities to the last bit, the scores of the prompt and the reason of the end depend on
nothing else. What is sampled beside it changes no bit. Neither do the prompts that the server
knows, or the adapters that it put out of memory.

It sends many requests at once, over more adapters than fit into memory if `--adapters` says so.
Beginnings of prompts are shared, lengths, temperatures, `top_p`, `top_k` and stop strings differ.
New versions of adapters are published meanwhile, and copies of some requests are given up. Then
every request is sent again, alone and in another order. The last line counts the samples that
differ. The exit status is 1 if there is one, or if a request failed, and 2 if it cannot begin.

By `native` and `tinker` it trains the adapters itself, one step for each version. By `openai` each
`--model` is the fixed weights of one adapter. `--publish-command` is then run for each publish,
and must change none of these: it loads another adapter, or another version by another name.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import tinker

import tinsmith
from tests.determinism.native_target import NativeTarget
from tests.determinism.openai_target import OpenAITarget
from tests.determinism.passes import Report, hold
from tests.determinism.plan import Publish, Size, make_plan
from tests.determinism.target import Target
from tests.determinism.tinker_target import TinkerTarget

PROTOCOLS = ("native", "tinker", "openai")


class CommandError(Exception):
    """The command that publishes failed."""


def parser() -> argparse.ArgumentParser:
    """Return the arguments of the program."""
    found = argparse.ArgumentParser(
        prog="python -m tests.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--base-url", required=True, help="of the server, as its SDK takes it")
    found.add_argument("--key", default="none")
    found.add_argument("--protocol", choices=PROTOCOLS, default="native")
    found.add_argument(
        "--model", action="append", required=True, help="base model; by openai all models"
    )
    found.add_argument("--samples", type=int, default=1000)
    found.add_argument("--adapters", type=int, default=32, help="by openai each --model is one")
    found.add_argument("--publishes", type=int, help="while samples are drawn; as many as adapters")
    found.add_argument("--publish-command", help="of openai: a line for the shell")
    found.add_argument("--concurrency", type=int, default=64, help="requests at once")
    found.add_argument("--max-tokens", type=int, default=24, help="of the longest sample")
    found.add_argument("--last-token", type=int, default=200, help="largest id in prompts")
    found.add_argument("--images", action="store_true", help="the model reads pictures")
    found.add_argument("--timeout", type=float, default=300.0, help="of one request, in seconds")
    found.add_argument("--seed", type=int, default=0)
    return found


@asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[Target]:
    """Connect to the server that is asked for.

    Raises:
        TinsmithError: If it cannot be reached by its own protocol.
    """
    if options.protocol == "native":
        address = options.base_url.rpartition("://")[2].rstrip("/")
        async with tinsmith.Client(
            address, options.key, operation_timeout_s=options.timeout
        ) as native:
            yield NativeTarget(native, options.model[0])
    elif options.protocol == "tinker":
        with tinker.ServiceClient(base_url=options.base_url, api_key=options.key) as service:
            yield TinkerTarget(service, options.model[0])
    else:

        async def publish(weights: Publish) -> str:
            if weights.version and options.publish_command:
                await _run(options.publish_command)
            return str(options.model[weights.adapter])

        async with openai.AsyncOpenAI(
            base_url=options.base_url, api_key=options.key, timeout=options.timeout
        ) as client:
            yield OpenAITarget(client, publish)


async def _run(command: str) -> None:
    process = await asyncio.create_subprocess_shell(command)
    if await process.wait():
        raise CommandError(f"{command!r} ended with status {process.returncode}")


def size_of(options: argparse.Namespace) -> Size:
    """Return how much is asked for."""
    is_openai = options.protocol == "openai"
    num_adapters = len(options.model) if is_openai else options.adapters
    default = 0 if is_openai and not options.publish_command else num_adapters
    return Size(
        num_samples=options.samples,
        num_adapters=num_adapters,
        num_publishes=default if options.publishes is None else options.publishes,
        max_tokens=options.max_tokens,
        last_token=options.last_token,
        images=options.images,
    )


async def run(options: argparse.Namespace) -> Report:
    """Hold the server to its bits."""
    plan = make_plan(size_of(options), options.seed)
    async with connected(options) as target:
        return await hold(target, plan, concurrency=options.concurrency, timeout_s=options.timeout)


def describe(report: Report) -> str:
    """Return what came of it, in lines; the last one has the verdict."""
    found = [
        f"{report.num_published} versions published, {report.num_given_up} requests given up,"
        f" {report.at_once_s:.1f} s at once, {report.alone_s:.1f} s one by one",
        f"answers {report.digest}",
    ]
    if report.num_failed:
        found.append(f"{report.num_failed} FAILED; first: {report.first_failure}")
    if report.first_difference:
        found.append(f"first difference: {report.first_difference}")
    found.append(
        f"{report.num_differ} of {report.num_samples} samples differ,"
        f" and the scores of {report.num_scores_differ} prompts"
    )
    return "\n".join(found)


def main(arguments: list[str] | None = None) -> int:
    """Hold a server to its bits, print what came of it, and return the exit status."""
    options = parser().parse_args(arguments)
    if options.protocol != "openai" and len(options.model) > 1:
        parser().error(
            f"--protocol {options.protocol} takes one --model, which it trains adapters of"
        )
    if min(options.samples, options.adapters, options.concurrency, options.max_tokens) < 1:
        parser().error("--samples, --adapters, --concurrency and --max-tokens are at least 1")
    # Clients of other projects leave connections to the garbage collector.
    warnings.simplefilter("ignore", ResourceWarning)
    try:
        report = asyncio.run(run(options))
    except (tinsmith.TinsmithError, tinker.TinkerError, openai.OpenAIError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(report))
    return 0 if report.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
