"""What researchers look at: the pace of a run, and its health."""

from __future__ import annotations

from helm.observability.expressions import by_run, rate_by_run, ratio
from helm.observability.panels import Dashboard, Plot, Query, Row
from helm.observability.plots import RUN, RUN_NAME, one

RUN_PACE = Dashboard(
    "tinsmith-run",
    "Tinsmith: run",
    "The pace of a run and where its time goes.",
    ("project", "run"),
    [
        Row(
            "Pace",
            [
                one("Version", by_run(f"{RUN}_version"), RUN_NAME),
                one("Steps each minute", f"60 * {rate_by_run(f'{RUN}_steps_total')}", RUN_NAME),
                one(
                    "Trained tokens each second",
                    rate_by_run(f"{RUN}_trained_tokens_total"),
                    RUN_NAME,
                ),
                one(
                    "Sampled tokens each second",
                    rate_by_run(f"{RUN}_sampled_tokens_total"),
                    RUN_NAME,
                ),
                one(
                    "Part of an engine",
                    rate_by_run(f"{RUN}_engine_seconds_total"),
                    RUN_NAME,
                    "percentunit",
                ),
                one(
                    "Wait of an operation",
                    ratio(
                        rate_by_run(f"{RUN}_queue_wait_seconds_total"),
                        rate_by_run(f"{RUN}_operations_total"),
                    ),
                    RUN_NAME,
                    "s",
                ),
            ],
        ),
        Row(
            "Optimizer",
            [
                one("Loss by token", by_run(f"{RUN}_loss"), RUN_NAME),
                one("Norm of the gradient", by_run(f"{RUN}_gradient_norm"), RUN_NAME),
                one("Learning rate", by_run(f"{RUN}_learning_rate"), RUN_NAME, "sci"),
            ],
        ),
        Row(
            "Trouble",
            [
                one(
                    "Operations by outcome",
                    rate_by_run(f"{RUN}_operations_total", by="outcome"),
                    f"{RUN_NAME} {{{{outcome}}}}",
                ),
                one(
                    "Failed operations by reason",
                    rate_by_run(f"{RUN}_failed_operations_total", by="reason"),
                    f"{RUN_NAME} {{{{reason}}}}",
                ),
                one(
                    "Replay diverged",
                    by_run(f"{RUN}_replay_diverged"),
                    RUN_NAME,
                    limit_of="TinsmithReplayDiverged",
                ),
            ],
        ),
    ],
)


RL_HEALTH = Dashboard(
    "tinsmith-rl",
    "Tinsmith: RL health",
    "Whether a policy learns: reward, spread, KL, entropy, clipping, lengths, staleness.",
    ("project", "run"),
    [
        Row(
            "Reward, as clients report it",
            [
                one("Reward", by_run(f"{RUN}_reward"), RUN_NAME),
                one("Spread of rewards within a group", by_run(f"{RUN}_reward_spread"), RUN_NAME),
                Plot(
                    "Nothing to learn from",
                    [
                        Query(by_run(f"{RUN}_dead_group_fraction"), f"{RUN_NAME} dead groups"),
                        Query(
                            by_run(f"{RUN}_zero_advantage_fraction"),
                            f"{RUN_NAME} sequences without advantage",
                        ),
                    ],
                    "percentunit",
                ),
            ],
        ),
        Row(
            "Policy",
            [
                one("Entropy by token", by_run(f"{RUN}_entropy_nats"), RUN_NAME),
                one(
                    "KL(sampler || trainer)",
                    by_run(f"{RUN}_kl_nats", by="estimator"),
                    f"{RUN_NAME} {{{{estimator}}}}",
                    limit_of="TinsmithKlHigh",
                ),
                one(
                    "Largest mismatch of a token",
                    by_run(f"{RUN}_mismatch_nats"),
                    RUN_NAME,
                    limit_of="TinsmithMismatch",
                ),
                one(
                    "Importance ratio",
                    by_run(f"{RUN}_importance_ratio", by="statistic"),
                    f"{RUN_NAME} {{{{statistic}}}}",
                ),
                one(
                    "Tokens in the tails of the ratio",
                    by_run(f"{RUN}_importance_ratio_tail_fraction"),
                    RUN_NAME,
                    "percentunit",
                    limit_of="TinsmithImportanceTail",
                ),
                one(
                    "Clipped tokens by side",
                    by_run(f"{RUN}_clip_fraction", by="side"),
                    f"{RUN_NAME} {{{{side}}}}",
                    "percentunit",
                ),
            ],
        ),
        Row(
            "Responses",
            [
                Plot(
                    "Length",
                    [
                        Query(by_run(f"{RUN}_trained_tokens_per_sequence"), f"{RUN_NAME} trained"),
                        Query(by_run(f"{RUN}_response_tokens"), f"{RUN_NAME} as reported"),
                        Query(
                            ratio(
                                rate_by_run(f"{RUN}_sampled_tokens_total"),
                                rate_by_run(f"{RUN}_sampled_sequences_total"),
                            ),
                            f"{RUN_NAME} sampled",
                        ),
                    ],
                ),
                Plot(
                    "Truncated responses",
                    [
                        Query(
                            ratio(
                                rate_by_run(
                                    f"{RUN}_sampled_sequences_total", 'stop_reason="length"'
                                ),
                                rate_by_run(f"{RUN}_sampled_sequences_total"),
                            ),
                            f"{RUN_NAME} sampled",
                        ),
                        Query(by_run(f"{RUN}_truncated_fraction"), f"{RUN_NAME} as reported"),
                    ],
                    "percentunit",
                    limit_of="TinsmithTruncatedResponses",
                ),
                one(
                    "Staleness of samples, in steps",
                    by_run(f"{RUN}_staleness_steps"),
                    RUN_NAME,
                    limit_of="TinsmithStaleSamples",
                ),
            ],
        ),
    ],
)
