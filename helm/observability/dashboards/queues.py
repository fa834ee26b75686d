"""What waits: trainers, episodes, matches, environments."""

from __future__ import annotations

from helm.observability.expressions import POOL, mean, quantile, rate, total
from helm.observability.panels import Dashboard, Plot, Query, Row
from helm.observability.plots import (
    COORDINATOR,
    ENVIRONMENT,
    SCHEDULER,
    TRAINER,
    by_label,
    one,
    spread,
)

QUEUES = Dashboard(
    "tinsmith-queues",
    "Tinsmith: queues and waiting",
    "What waits, where, and how long: trainers, episodes, matches, environments.",
    ("pool",),
    [
        Row(
            "Trainers",
            [
                one("Queued operations", total(f"{TRAINER}_queued_operations", POOL), "operations"),
                by_label(
                    "Runs that wait, by reason",
                    total(f"{TRAINER}_waiting_runs", POOL, "reason"),
                    "reason",
                ),
                spread("Wait for a cycle", f"{TRAINER}_queue_wait_seconds", POOL),
                by_label(
                    "Operations each second",
                    rate(f"{TRAINER}_operations_total", POOL, "kind, outcome"),
                    "kind}} {{outcome",
                ),
                by_label(
                    "Time on the engine by operation",
                    mean(f"{TRAINER}_operation_duration_seconds", POOL, "kind"),
                    "kind",
                    "s",
                ),
                one(
                    "Pace while computing, tokens each second",
                    total(f"{TRAINER}_computed_tokens_per_second", POOL),
                    "pace",
                ),
            ],
        ),
        Row(
            "Cycles: a step is wait, engine, commit",
            [
                Plot(
                    "Split of a step",
                    [
                        Query(mean(f"{TRAINER}_queue_wait_seconds", POOL), "wait for a cycle"),
                        Query(mean(f"{TRAINER}_cycle_duration_seconds", POOL), "engine"),
                        Query(mean(f"{TRAINER}_commit_duration_seconds", POOL), "commit"),
                    ],
                    "s",
                ),
                spread("Cycle on the engine", f"{TRAINER}_cycle_duration_seconds", POOL),
                Plot(
                    "Packing of a cycle",
                    [
                        Query(mean(f"{TRAINER}_cycle_tokens", POOL), "tokens"),
                        Query(mean(f"{TRAINER}_cycle_runs", POOL), "runs"),
                    ],
                ),
            ],
        ),
        Row(
            "Paging",
            [
                by_label(
                    "Runs restored each second",
                    rate(f"{TRAINER}_restored_runs_total", POOL, "source"),
                    "source",
                ),
                one(
                    "Runs parked each second", rate(f"{TRAINER}_parked_runs_total", POOL), "parked"
                ),
                spread("Time to restore a run", f"{TRAINER}_restore_duration_seconds", POOL),
                one(
                    "Host memory of parked runs",
                    total(f"{TRAINER}_parked_bytes", POOL),
                    "parked",
                    "bytes",
                ),
                spread("Placement of a new run", f"{SCHEDULER}_placement_duration_seconds"),
                Plot(
                    "Runs between trainers",
                    [
                        Query(rate(f"{SCHEDULER}_moved_runs_total"), "moved each second"),
                        Query(f"max({SCHEDULER}_pending_releases)", "to be released"),
                    ],
                ),
            ],
        ),
        Row(
            "Episodes",
            [
                by_label(
                    "Open episodes", total(f"{COORDINATOR}_open_episodes", by="state"), "state"
                ),
                Plot(
                    "Episodes each second",
                    [
                        Query(rate(f"{COORDINATOR}_registered_episodes_total"), "registered"),
                        Query(
                            rate(f"{COORDINATOR}_ended_episodes_total", by="type, state"),
                            "{{type}} {{state}}",
                        ),
                    ],
                ),
                by_label(
                    "Answers to claims", rate(f"{COORDINATOR}_claims_total", by="answer"), "answer"
                ),
                spread("Look for an episode", f"{COORDINATOR}_claim_duration_seconds"),
                Plot(
                    "Lost attempts and late calls",
                    [
                        Query(
                            rate(f"{COORDINATOR}_lost_attempts_total", by="cause"),
                            "lost: {{cause}}",
                        ),
                        Query(
                            rate(f"{COORDINATOR}_fenced_calls_total", by="reason"),
                            "refused: {{reason}}",
                        ),
                    ],
                ),
                Plot(
                    "Recorded model calls",
                    [
                        Query(rate(f"{COORDINATOR}_recorded_model_calls_total"), "calls"),
                        Query(f"{rate(f'{COORDINATOR}_recorded_bytes_total')} / 1024", "KiB"),
                    ],
                ),
            ],
        ),
        Row(
            "Matches",
            [
                Plot(
                    "Matches each second",
                    [
                        Query(rate(f"{COORDINATOR}_created_matches_total"), "created"),
                        Query(rate(f"{COORDINATOR}_ended_matches_total", by="state"), "{{state}}"),
                    ],
                ),
                Plot(
                    "Barriers and turns each second",
                    [
                        Query(rate(f"{COORDINATOR}_opened_barriers_total"), "barriers"),
                        Query(rate(f"{COORDINATOR}_turns_total"), "turns"),
                    ],
                ),
                by_label(
                    "Time limits not kept",
                    rate(f"{COORDINATOR}_expired_limits_total", by="limit"),
                    "limit",
                ),
            ],
        ),
        Row(
            "Rollouts on the server",
            [
                one(
                    "Episodes that are played", total(f"{COORDINATOR}_playing_episodes"), "episodes"
                ),
                by_label(
                    "Batches each second",
                    rate(f"{COORDINATOR}_rollout_batches_total", by="event"),
                    "event",
                ),
                by_label(
                    "Plays that ended each second",
                    rate(f"{COORDINATOR}_played_episodes_total", by="outcome"),
                    "outcome",
                ),
                one(
                    "Sampled tokens each second",
                    rate(f"{COORDINATOR}_rollout_sampled_tokens_total"),
                    "tokens",
                ),
            ],
        ),
        Row(
            "Environments",
            [
                one(
                    "Instances that are played",
                    total(f"{ENVIRONMENT}_active_instances", POOL),
                    "instances",
                ),
                by_label(
                    "Steps each second",
                    rate(f"{ENVIRONMENT}_step_duration_seconds_count", POOL, "environment"),
                    "environment",
                ),
                by_label(
                    "Step p95",
                    quantile(0.95, f"{ENVIRONMENT}_step_duration_seconds", POOL, "environment"),
                    "environment",
                    "s",
                ),
                by_label(
                    "Reset p95",
                    quantile(0.95, f"{ENVIRONMENT}_reset_duration_seconds", POOL, "environment"),
                    "environment",
                    "s",
                ),
                by_label(
                    "Failures by cause",
                    rate(f"{ENVIRONMENT}_failures_total", POOL, "cause"),
                    "cause",
                ),
                by_label(
                    "Ends of episodes each second",
                    rate(f"{ENVIRONMENT}_episodes_total", POOL, "outcome"),
                    "outcome",
                ),
                by_label(
                    "Mean reward of an episode",
                    f"{rate(f'{ENVIRONMENT}_episode_reward_sum', POOL, 'environment')} / "
                    f"{rate(f'{ENVIRONMENT}_episode_reward_count', POOL, 'environment')}",
                    "environment",
                ),
                spread("Start of a worker", f"{ENVIRONMENT}_worker_start_duration_seconds", POOL),
                Plot(
                    "Cleaning up",
                    [
                        Query(
                            rate(f"{ENVIRONMENT}_expired_instances_total", POOL),
                            "instances left behind",
                        ),
                        Query(
                            rate(f"{ENVIRONMENT}_worker_restarts_total", POOL, "cause"),
                            "workers replaced: {{cause}}",
                        ),
                    ],
                ),
            ],
        ),
    ],
)
