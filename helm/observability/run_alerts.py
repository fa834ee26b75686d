"""Alerts about the health of runs.

A gauge by run holds the value of the last step. So windows are minutes: several steps of most
loops. What is normal for a run is what it did in the half hour before. Figures by project
and run come from trainers, samplers and clients; `max by` makes them comparable.
"""

from __future__ import annotations

from collections.abc import Sequence

from helm.observability.alerts import TEAM_RUN, TEAM_SERVICE, Alert

_RUN = "{{ $labels.project }}/{{ $labels.run }}"


def _now(metric: str, window: str = "2m") -> str:
    return f"max by (project, run) (avg_over_time({metric}[{window}]))"


def _before(metric: str) -> str:
    return f"max by (project, run) (avg_over_time({metric}[30m] offset 5m))"


def _rate(metric: str, window: str) -> str:
    return f"sum by (project, run) (rate({metric}[{window}]))"


_ENTROPY = "tinsmith_run_entropy_nats"
_LENGTH = "tinsmith_run_trained_tokens_per_sequence"
_KL = 'tinsmith_run_kl_nats{estimator="v2"}'
_REWARD = "tinsmith_run_reward"
_CLIP = "tinsmith_run_clip_fraction"
_HIGH, _LOW = f'{_CLIP}{{side="high"}}', f'{_CLIP}{{side="low"}}'
_SEQUENCES = "tinsmith_run_sampled_sequences_total"
_TRUNCATED = f'{_SEQUENCES}{{stop_reason="length"}}'
_STEPS = "tinsmith_run_steps_total"


def _one_sided(much: str, little: str) -> str:
    return (
        f"({_now(much, '3m')} > 0.1 and on (project, run) "
        f"{_now(little, '3m')} < 0.1 * {_now(much, '3m')})"
    )


RUN_ALERTS: Sequence[Alert] = (
    Alert(
        name="TinsmithEntropyCollapse",
        expression=f"{_now(_ENTROPY)} < 0.25 * {_before(_ENTROPY)} and {_before(_ENTROPY)} > 0.05",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"The entropy of {_RUN} fell to {{{{ $value | humanize }}}} nats, a quarter of "
        "before.",
        means="The policy gives one answer whatever it is asked: it explores no more.",
        remedy="Lower the learning rate or go back to an earlier checkpoint; add a KL term "
        "or raise "
        "the sampling temperature; look whether the reward pays for one phrase.",
    ),
    Alert(
        name="TinsmithRewardCollapse",
        expression=f"{_now(_REWARD, '3m')} < 0.5 * {_before(_REWARD)} and {_before(_REWARD)} "
        "> 0.05",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"The reward of {_RUN} fell to {{{{ $value | humanize }}}}, half of before.",
        means="What the run learned is lost, or its environment answers differently.",
        remedy="Compare the norm of the gradient and KL before the fall; look at failures of the "
        "environment; go on from the checkpoint before it.",
    ),
    Alert(
        name="TinsmithRewardHack",
        expression=f"{_now(_REWARD, '3m')} > 1.3 * {_before(_REWARD)} and {_now(_KL, '3m')} > 0.03",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"The reward of {_RUN} jumps to {{{{ $value | humanize }}}} while its KL is high.",
        means="Reward that rises fast with a policy that runs away is more often a gap in "
        "the reward "
        "than a success.",
        remedy="Read a dozen trajectories of the last step; check the grader on them by "
        "hand; lower "
        "the learning rate.",
    ),
    Alert(
        name="TinsmithResponseLengthBlowUp",
        expression=f"{_now(_LENGTH)} > 2 * {_before(_LENGTH)} and {_before(_LENGTH)} > 1",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"Responses of {_RUN} are {{{{ $value | humanize }}}} tokens long, twice as "
        "long as before.",
        means="The policy pads its answers, or never ends them.",
        remedy="Look at the share that is truncated; check that the end of an answer is trained; "
        "penalise length or mask truncated responses.",
    ),
    Alert(
        name="TinsmithKlHigh",
        expression=f"{_now(_KL)} > 0.01",
        lasts="2m",
        severity="warning",
        team=TEAM_RUN,
        says=f"KL between sampler and trainer of {_RUN} is {{{{ $value | humanize }}}} nats "
        "by token.",
        means="Above 0.01 samples are no longer those of the policy that is trained.",
        remedy="Look at staleness and mismatch: fresher samples, fewer steps for each batch, or a "
        "lower learning rate.",
    ),
    Alert(
        name="TinsmithKlSpike",
        expression=f"max by (project, run) (max_over_time({_KL}[2m])) > 0.1",
        lasts="0m",
        severity="critical",
        team=TEAM_RUN,
        says=f"KL between sampler and trainer of {_RUN} jumped to "
        f"{{{{ $value | humanize }}}} nats.",
        means="One step moved the policy far: the next samples may be worthless.",
        remedy="Look at the norm of the gradient of that step; clip it; go back to the checkpoint "
        "before.",
    ),
    Alert(
        name="TinsmithImportanceTail",
        expression=f"{_now('tinsmith_run_importance_ratio_tail_fraction')} > 0.05",
        lasts="2m",
        severity="warning",
        team=TEAM_RUN,
        says=f"{{{{ $value | humanizePercentage }}}} of the tokens of {_RUN} have an "
        "importance ratio "
        "beyond 2.",
        means="A few tokens rule the gradient.",
        remedy="Clip ratios (`ppo`, `cispo`), or sample more often.",
    ),
    Alert(
        name="TinsmithMismatch",
        expression=f"{_now('tinsmith_run_mismatch_nats', '3m')} > 2",
        lasts="2m",
        severity="warning",
        team=TEAM_RUN,
        says=f"Sampler and trainer of {_RUN} differ by {{{{ $value | humanize }}}} nats on a "
        "token.",
        means="With fresh samples the exact profile gives 0; another engine or old samples do not.",
        remedy="Compare staleness: if it is 0, compare dtypes and templates of sampler and "
        "trainer.",
    ),
    Alert(
        name="TinsmithStaleSamples",
        expression=f"{_now('tinsmith_run_staleness_steps')} > 8",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"Samples of {_RUN} are {{{{ $value | humanize }}}} steps old.",
        means="The loop trains faster than it samples, or samplers do not get new weights.",
        remedy="Look at the time to new weights and what samplers load; bound the lag of the loop.",
    ),
    Alert(
        name="TinsmithTruncatedResponses",
        expression=f"{_rate(_TRUNCATED, '3m')} / {_rate(_SEQUENCES, '3m')} > 0.5",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"{{{{ $value | humanizePercentage }}}} of the responses of {_RUN} are cut at "
        "their limit.",
        means="Answers end before they can be judged.",
        remedy="Raise `max_tokens`, or mask truncated responses in the loss.",
    ),
    Alert(
        name="TinsmithOneSidedClipping",
        expression=f"{_one_sided(_HIGH, _LOW)} or {_one_sided(_LOW, _HIGH)}",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"{{{{ $value | humanizePercentage }}}} of the tokens of {_RUN} are clipped on "
        "one side.",
        means="Updates push probabilities in one direction: advantages are not centred, or samples "
        "are old.",
        remedy="Check that advantages of a group sum to 0; take fewer steps for each batch.",
    ),
    Alert(
        name="TinsmithDeadGroups",
        expression=f"{_now('tinsmith_run_zero_advantage_fraction', '3m')} > 0.8 or "
        f"{_now('tinsmith_run_dead_group_fraction', '3m')} > 0.8",
        lasts="1m",
        severity="warning",
        team=TEAM_RUN,
        says=f"{{{{ $value | humanizePercentage }}}} of the groups of {_RUN} teach nothing.",
        means="All answers of a group have the same reward: tasks are too easy or too hard.",
        remedy="Choose tasks near the policy's ability; make groups larger or the "
        "temperature higher.",
    ),
    Alert(
        name="TinsmithRunFails",
        expression="sum by (project, run) (increase(tinsmith_run_failed_operations_total"
        '{reason="NON_FINITE_LOSS"}[5m])) > 0',
        lasts="0m",
        severity="warning",
        team=TEAM_RUN,
        says=f"Batches of {_RUN} give a NaN or infinite loss.",
        means="Its numbers exploded, or its data hold NaN. Other runs are not touched.",
        remedy="Look at the last loss and gradient; lower the learning rate; go back to a "
        "checkpoint.",
    ),
    Alert(
        name="TinsmithRunSlow",
        expression=f"{_rate(_STEPS, '4m')} < 0.3 * "
        f"sum by (project, run) (rate({_STEPS}[30m] offset 5m)) and "
        f"{_rate('tinsmith_run_engine_seconds_total', '4m')} > 0",
        lasts="1m",
        severity="info",
        team=TEAM_RUN,
        says=f"{_RUN} makes {{{{ $value | humanize }}}} steps a second, a third of its pace "
        "before.",
        means="The run is active and slow: its loop, its environment, or its turn in the queue.",
        remedy="Compare the wait of its operations with that of other runs: if it is not "
        "longer, the "
        "time goes in the client.",
    ),
    Alert(
        name="TinsmithReplayDiverged",
        expression="max by (project, run) (tinsmith_run_replay_diverged) > 0",
        lasts="0m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"A replay of {_RUN} gave other bits than its first execution.",
        means="The promise of equal bits is broken for this run, though every acknowledged "
        "result is "
        "kept.",
        remedy="Compare the numerics fingerprints in the trainer's log (device, build); the "
        "run goes "
        "on, and says so wherever it is shown.",
    ),
)
