"""`python -m tests.page`: the page in Chromium, each state on a server of its own.

Needs `clients/web/node_modules` and a Chromium (`make test-page` gets them). Prints what is wrong
and what was measured, and fails if anything is wrong or slower than its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tinsmith
from tests.integration.servers import BASE_MODEL, Deployment
from tests.page import states
from tests.page.browser import Findings, look_at
from tests.page.pictures import keep
from tinsmith.errors import TinsmithError
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_TOKENS_OF_A_TRAJECTORY = 200
BOUNDS_S = {
    "page with 1,000 runs opens": 1.0,
    "run of 100,000 steps opens": 1.0,
    "list of 100,000 episodes opens": 1.0,
    "file of 100,000 trajectories opens": 1.0,
    "episode by token opens": 0.2,
    "trajectory by token opens": 0.2,
}
"""How long each measured thing may take: the median of its repeats."""


@dataclass(frozen=True)
class Scene:
    """A server in some state, and what the browser opens there."""

    deployment: Deployment
    run: str = ""
    file: Path | None = None


@contextlib.contextmanager
def empty(folder: Path, model_dir: Path) -> Iterator[Scene]:
    """Run a server on which nothing was done."""
    with states.server(folder / "empty", model_dir) as deployment:
        yield Scene(deployment)


@contextlib.contextmanager
def live(folder: Path, model_dir: Path) -> Iterator[Scene]:
    """Run a server with everything, and a run that goes on."""
    with states.server(folder / "live", model_dir) as deployment, deployment.client() as client:
        states.fill(client)
        run = client.create_lora_training_run(BASE_MODEL, rank=8, display_name="grpo, live")
        noise = random.Random(1)
        for number in range(140):
            run.log_metrics(states.curve_point(number, 1.2, noise), step=number)
        going_on = states.GrowingRun(run, 140, noise)
        try:
            yield Scene(deployment)
        finally:
            going_on.stop()


@contextlib.contextmanager
def failed(folder: Path, model_dir: Path) -> Iterator[Scene]:
    """Run a server whose trainer has room for one run, and let a second one fail."""
    room = {"trainer": {"max_runs": 1}, "scheduler": {"placement_timeout_s": 1.0}}
    with (
        states.server(folder / "failed", model_dir, **room) as deployment,
        deployment.client() as client,
    ):
        states.step(client.create_lora_training_run(BASE_MODEL, rank=4, display_name="in time"))
        with contextlib.suppress(TinsmithError):
            client.create_lora_training_run(BASE_MODEL, rank=4, display_name="out of room")
        yield Scene(deployment)


@contextlib.contextmanager
def many(folder: Path, model_dir: Path) -> Iterator[Scene]:
    """Run a server with 1,000 runs."""
    with (
        states.server(folder / "many", model_dir) as deployment,
        deployment.client() as client,
    ):
        states.step(client.create_lora_training_run(BASE_MODEL, rank=4, display_name="sweep 0"))
    states.plant_runs(folder / "many")
    with states.server(folder / "many", model_dir) as deployment:
        yield Scene(deployment)


@contextlib.contextmanager
def long(folder: Path, model_dir: Path) -> Iterator[Scene]:
    """Run a server with a run of 100,000 steps and 100,000 episodes; a file has as many lines."""
    fast = {"scheduler": {"max_metric_points_per_s": 1e9}}
    data_dir = folder / "long"
    with states.server(data_dir, model_dir, **fast) as deployment, deployment.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4, display_name="100,000 steps")
        states.step(run)
        states.record_long_run(deployment, run.name)
        sampler = client.create_sampler(base_model=BASE_MODEL)
        client.episodes.create(
            [tinsmith.EpisodeSpec({"q": "tin"}, task_id="tin")], queue="page", sampler=sampler
        )
        states.play_episode(client, "Repeat: tin", reward=1.0)
    states.plant_episodes(data_dir)
    file = folder / "trajectories.jsonl"
    states.write_trajectories(file, states.NUM_TRAJECTORIES, _TOKENS_OF_A_TRAJECTORY)
    with states.server(data_dir, model_dir, **fast) as deployment:
        yield Scene(deployment, run.name.rpartition("/")[2], file)


STATES: dict[str, Callable[[Path, Path], contextlib.AbstractContextManager[Scene]]] = {
    "empty": empty,
    "live": live,
    "failed": failed,
    "many": many,
    "slow": live,
    "long": long,
}


def main() -> int:
    """Look at every state; return how many have problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="a folder for all pictures")
    parser.add_argument("--kept", type=Path, help="a folder for the few that are committed")
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, _CHROMIUMS)), ""))
    parser.add_argument("states", nargs="*", metavar="STATE", help=f"of {' '.join(STATES)}; or all")
    options = parser.parse_args()
    if not options.chromium:
        parser.error("no Chromium is installed: apt-get install chromium, or name one")
    unknown = set(options.states) - set(STATES)
    if unknown:
        parser.error(f"there is no state {' '.join(sorted(unknown))}: choose of {' '.join(STATES)}")
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="tinsmith-page-") as name:
        folder = Path(name)
        pictures = options.pictures or folder / "pictures"
        model_dir = build_tiny_model(folder / "model", TinyModelConfig())
        for state in options.states or STATES:
            with STATES[state](folder / state, model_dir) as scene:
                found = look_at(
                    state,
                    address=scene.deployment.address,
                    key=scene.deployment.api_key,
                    chromium=options.chromium,
                    pictures=pictures,
                    run=scene.run,
                    file=scene.file,
                )
            num_bad += _say(state, found)
        if options.kept is not None:
            keep(pictures, options.kept)
    return num_bad


def _say(state: str, found: Findings) -> bool:
    """Print what was found; return whether any of it is wrong."""
    slow = [
        f"{name} in {value:.3f} s, more than {BOUNDS_S[name]:g} s"
        for name, value in found.figures.items()
        if value > BOUNDS_S[name]
    ]
    wrong = [*found.problems, *slow]
    lines = [f"{state}: {'bad' if wrong else 'good'}", *(f"  {problem}" for problem in wrong)]
    lines += [f"  {name}: {value:.3f} s" for name, value in found.figures.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
