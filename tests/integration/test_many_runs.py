"""Hundreds of runs one after another, with the defaults: none is used up, and all come back."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.servers import BASE_MODEL, EmbeddedThread

import tinsmith
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_trainer.config import TrainerConfig

_NUM_RUNS = 300
_DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)
_ADAM = tinsmith.AdamParams(learning_rate=1e-2)


def _field(config: type[SchedulerConfig] | type[TrainerConfig], name: str) -> int:
    return int(config.__dataclass_fields__[name].default)


def test_more_runs_than_may_live_at_once_follow_each_other(
    make_embedded: Callable[..., EmbeddedThread],
) -> None:
    assert _field(SchedulerConfig, "max_runs_per_project") < _NUM_RUNS
    server = make_embedded()
    deployment = server.start()
    names: list[str] = []
    for number in range(_NUM_RUNS):
        # The session ends with its client.
        with deployment.client() as client:
            run = client.create_lora_training_run(BASE_MODEL, rank=2, seed=number)
            if number % 50 == 0:
                run.forward_backward([_DATUM])
                run.optim_step(_ADAM).result()
                names.append(run.name)
    with deployment.client() as client:
        listed = {info.name for info in client.runs.list()}
        assert len(listed) == _NUM_RUNS
        assert set(names) <= listed
    server.stop()
    deployment = server.start()
    with deployment.client() as client:
        for name in names:
            run = client.runs.get(name)
            assert run.version == 1
            run.forward_backward([_DATUM])
            assert run.optim_step(_ADAM).result().version == 2
