"""Series as a healthy deployment has them, and twelve illnesses to plant in them.

A step is half a minute. What a healthy run shows is noise around slow trends, drawn from a seed;
sizes of the noise are those of loops that went well. An illness changes some series from a step on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STEP_S = 30
Values = npt.NDArray[np.float64]
Series = dict[str, Values]

RUN = 'project="p",run="ill",instance="trainer-0"'
OTHER = 'project="p",run="well",instance="trainer-0"'
_POD = 'instance="{}-0"'


def _labels(run: str, more: str = "") -> str:
    return f"{{{run}{',' + more if more else ''}}}"


def run_series(generator: np.random.Generator, num_steps: int, run: str) -> Series:
    """Return the series of one healthy run."""
    steps = np.arange(num_steps)
    progress = steps / max(1000, num_steps)

    def noisy(level: Values | float, share: float) -> Values:
        return np.maximum(0.0, level * (1 + share * generator.standard_normal(num_steps)))

    def counter(level: float, share: float) -> Values:
        return np.cumsum(np.round(noisy(level, share)))

    def gauge(name: str, values: Values, more: str = "") -> None:
        found[f"tinsmith_run_{name}{_labels(run, more)}"] = values

    found: Series = {}
    gauge("reward", noisy(0.4 + 0.4 * progress, 0.06))
    gauge("reward_spread", noisy(0.3, 0.1))
    gauge("dead_group_fraction", np.clip(noisy(0.3, 0.3), 0, 1))
    gauge("entropy_nats", noisy(1.2 - 0.6 * progress, 0.06))
    gauge("kl_nats", 1e-3 * generator.lognormal(0, 0.6, num_steps), 'estimator="v2"')
    gauge("kl_nats", 1e-3 * generator.standard_normal(num_steps), 'estimator="v1"')
    gauge("importance_ratio_tail_fraction", noisy(0.004, 0.5))
    gauge("clip_fraction", noisy(0.02, 0.4), 'side="high"')
    gauge("clip_fraction", noisy(0.015, 0.4), 'side="low"')
    gauge("mismatch_nats", noisy(0.3, 0.4))
    gauge("zero_advantage_fraction", np.clip(noisy(0.35, 0.25), 0, 1))
    gauge("trained_tokens_per_sequence", noisy(300 + 200 * progress, 0.1))
    gauge("staleness_steps", generator.integers(0, 3, num_steps).astype(np.float64))
    gauge("replay_diverged", np.zeros(num_steps))
    gauge("steps_total", counter(1, 0.25))
    gauge("engine_seconds_total", counter(9, 0.2))
    gauge("sampled_sequences_total", counter(120, 0.1), 'stop_reason="stop"')
    gauge("sampled_sequences_total", counter(10, 0.4), 'stop_reason="length"')
    gauge("failed_operations_total", np.zeros(num_steps), 'reason="NON_FINITE_LOSS"')
    return found


def service_series(generator: np.random.Generator, num_steps: int) -> Series:
    """Return the series of the pods of a healthy deployment."""

    def counter(level: float) -> Values:
        noise = 1 + 0.2 * generator.standard_normal(num_steps)
        return np.cumsum(np.round(np.maximum(0.0, level * noise)))

    def level(low: int, high: int) -> Values:
        return generator.integers(low, high, num_steps).astype(np.float64)

    def constant(value: float) -> Values:
        return np.full(num_steps, value)

    trainer, sampler, environment, scheduler, controller = (
        _POD.format(name)
        for name in ("trainer", "sampler", "environment", "scheduler", "controller")
    )
    store = f'{trainer},operation="write",outcome='
    return {
        f'up{{job="tinsmith-metrics",{trainer}}}': constant(1),
        f"tinsmith_trainer_queued_operations{{{trainer}}}": level(0, 6),
        f"tinsmith_trainer_operations_total{{{trainer}}}": counter(8),
        f"tinsmith_trainer_resident_runs{{{trainer}}}": constant(2),
        f'tinsmith_trainer_engine_seconds_total{{{trainer},part="passes"}}': counter(15),
        f"tinsmith_trainer_lease_age_seconds{{{trainer}}}": level(0, 4),
        f"tinsmith_trainer_data_free_bytes{{{trainer}}}": constant(5e10),
        f"tinsmith_trainer_data_size_bytes{{{trainer}}}": constant(1e11),
        f"tinsmith_ledger_waiting_writes{{{trainer}}}": np.round(
            generator.exponential(40, num_steps)
        ),
        f'tinsmith_object_store_request_duration_seconds_count{{{store}"ok"}}': counter(20),
        f'tinsmith_certificate_expiry_timestamp_seconds{{{trainer},use="pods"}}': constant(6e6),
        f"tinsmith_scheduler_next_key_expiry_timestamp_seconds{{{scheduler}}}": constant(1e9),
        f"tinsmith_scheduler_waiting_runs{{{scheduler}}}": constant(0),
        f"tinsmith_sampler_waiting_sequences{{{sampler}}}": level(1, 64),
        f'tinsmith_sampler_sequences_total{{{sampler},stop_reason="stop"}}': counter(240),
        f"tinsmith_sampler_engine_restarts_total{{{sampler}}}": constant(0),
        f"tinsmith_environment_active_instances{{{environment}}}": level(20, 60),
        f"tinsmith_environment_step_duration_seconds_count{{{environment}}}": counter(400),
        f"tinsmith_environment_reset_duration_seconds_count{{{environment}}}": counter(60),
        f"tinsmith_environment_failures_total{{{environment}}}": counter(0.4),
        f"tinsmith_controller_is_leader{{{controller}}}": constant(1),
    }


def healthy(seed: int, num_steps: int) -> Series:
    """Return a healthy deployment with two runs."""
    generator = np.random.default_rng(seed)
    return {
        **run_series(generator, num_steps, RUN),
        **run_series(generator, num_steps, OTHER),
        **service_series(generator, num_steps),
    }


Plant = Callable[[Callable[[str], Values], int], None]
"""Changes series, which it finds by the beginning of their names, from a step on."""


@dataclass(frozen=True, slots=True)
class Illness:
    """Something that goes wrong.

    Attributes:
        named_by: The alert that names it.
        plant: Plants it in the series.
    """

    named_by: str
    plant: Plant


def _fade(values: Values, begin: int, target: float, num_steps: float) -> None:
    """Let a series go from what it is to a multiple of it."""
    ages = np.arange(1, len(values) - begin + 1)
    values[begin:] *= target ** np.minimum(1.0, ages / num_steps)


def _slow(values: Values, begin: int, share: float) -> None:
    """Let a counter grow by a share of what it grew."""
    grown = np.diff(values, prepend=0)
    grown[begin:] = np.floor(np.cumsum(grown[begin:] * share) + 0.5)
    grown[begin + 1 :] -= np.floor(grown[begin:-1])
    values[:] = np.cumsum(grown)


def _collapse(find: Callable[[str], Values], begin: int) -> None:
    _fade(find("entropy_nats"), begin, 0.02, 8)


def _lengthen(find: Callable[[str], Values], begin: int) -> None:
    _fade(find("trained_tokens_per_sequence"), begin, 4, 10)


def _spike(find: Callable[[str], Values], begin: int) -> None:
    find("kl_nats{v2}")[begin + 1 : begin + 3] = 0.4


def _hack(find: Callable[[str], Values], begin: int) -> None:
    _fade(find("reward{"), begin, 2.2, 8)
    _fade(find("kl_nats{v2}"), begin, 80, 8)


def _stick(find: Callable[[str], Values], begin: int) -> None:
    for name in ("environment_step_duration_seconds_count", "environment_reset_duration"):
        values = find(name)
        values[begin:] = values[begin - 1]


def _stale(find: Callable[[str], Values], begin: int) -> None:
    values = find("staleness_steps")
    values[begin:] = np.arange(len(values) - begin) + 1


def _starve(find: Callable[[str], Values], begin: int) -> None:
    values = find("trainer_engine_seconds_total")
    values[begin:] = values[begin - 1]
    find("trainer_queued_operations")[begin:] = 0


def _truncate(find: Callable[[str], Values], begin: int) -> None:
    cut, whole = find("sampled_sequences_total{length}"), find("sampled_sequences_total{stop}")
    cut[begin:] = cut[begin - 1] + 110 * np.arange(1, len(cut) - begin + 1)
    _slow(whole, begin, 0.15)


def _clip(find: Callable[[str], Values], begin: int) -> None:
    find("clip_fraction{high}")[begin:] *= 12
    find("clip_fraction{low}")[begin:] *= 0.1


def _die(find: Callable[[str], Values], begin: int) -> None:
    find("zero_advantage_fraction")[begin:] = 0.97


def _nan(find: Callable[[str], Values], begin: int) -> None:
    values = find("failed_operations_total")
    values[begin:] = np.arange(1, len(values) - begin + 1)


def _drag(find: Callable[[str], Values], begin: int) -> None:
    for name in ("steps_total", "run_engine_seconds_total"):
        _slow(find(name), begin, 0.12)


ILLNESSES: Mapping[str, Illness] = {
    "entropy collapse": Illness("TinsmithEntropyCollapse", _collapse),
    "length blow-up": Illness("TinsmithResponseLengthBlowUp", _lengthen),
    "KL spike": Illness("TinsmithKlSpike", _spike),
    "reward hack": Illness("TinsmithRewardHack", _hack),
    "stuck environment": Illness("TinsmithEnvironmentStuck", _stick),
    "stale sampler": Illness("TinsmithStaleSamples", _stale),
    "starved trainer": Illness("TinsmithTrainerStarved", _starve),
    "truncation": Illness("TinsmithTruncatedResponses", _truncate),
    "one-sided clipping": Illness("TinsmithOneSidedClipping", _clip),
    "dead groups": Illness("TinsmithDeadGroups", _die),
    "NaN tenant": Illness("TinsmithRunFails", _nan),
    "slow tenant": Illness("TinsmithRunSlow", _drag),
}


def planted(illness: Illness, seed: int, begin: int, num_steps: int) -> Series:
    """Return a deployment whose first run, or whose pods, fall ill at a step."""
    series = healthy(seed, num_steps)

    def find(wanted: str) -> Values:
        name, _, value = wanted.removesuffix("}").partition("{")
        # A brace without a value ends the name.
        end = "{" if "{" in wanted else ""
        [found] = [
            each
            for each in series
            if f"_{name}{end}" in each and 'run="well"' not in each and f'"{value}' in each
        ]
        return series[found]

    illness.plant(find, begin)
    return series
