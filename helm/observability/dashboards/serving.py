"""Samplers, and what makes results durable."""

from __future__ import annotations

from helm.observability.expressions import POOL, mean, quantile, rate, ratio, total
from helm.observability.panels import Dashboard, Plot, Query, Row
from helm.observability.plots import GATEWAY, SAMPLER, SCHEDULER, TRAINER, by_label, one, spread

SAMPLERS = Dashboard(
    "tinsmith-samplers",
    "Tinsmith: samplers",
    "Decoding: throughput, latency, cache, and how new the weights are.",
    ("pool",),
    [
        Row(
            "Throughput",
            [
                Plot(
                    "Tokens each second",
                    [
                        Query(rate(f"{SAMPLER}_sampled_tokens_total", POOL), "sampled"),
                        Query(rate(f"{SAMPLER}_prompt_tokens_total", POOL), "of prompts"),
                        Query(
                            rate(f"{SAMPLER}_cached_prompt_tokens_total", POOL),
                            "of prompts, cached",
                        ),
                    ],
                ),
                by_label(
                    "Sequences by how they ended",
                    rate(f"{SAMPLER}_sequences_total", POOL, "stop_reason"),
                    "stop_reason",
                ),
                Plot(
                    "Unfinished",
                    [
                        Query(total(f"{SAMPLER}_waiting_sequences", POOL), "sequences"),
                        Query(total(f"{SAMPLER}_open_streams", POOL), "streams"),
                    ],
                ),
            ],
        ),
        Row(
            "Latency",
            [
                spread("Request", f"{SAMPLER}_request_duration_seconds", POOL),
                spread("First token of a stream", f"{SAMPLER}_time_to_first_token_seconds", POOL),
                spread("Time by token", f"{SAMPLER}_time_per_output_token_seconds", POOL),
            ],
        ),
        Row(
            "Cache",
            [
                Plot(
                    "Keys and values",
                    [
                        Query(
                            total(f"{SAMPLER}_kv_cache_used_bytes", POOL, "base_model"),
                            "{{base_model}} used",
                        ),
                        Query(
                            total(f"{SAMPLER}_kv_cache_bytes", POOL, "base_model"),
                            "{{base_model}} size",
                        ),
                    ],
                    "bytes",
                ),
                one(
                    "Hit rate of prefixes",
                    ratio(
                        rate(f"{SAMPLER}_cached_prompt_tokens_total", POOL),
                        rate(f"{SAMPLER}_prompt_tokens_total", POOL),
                    ),
                    "hits",
                    "percentunit",
                ),
                one(
                    "Sequences that gave way, each second",
                    rate(f"{SAMPLER}_preemptions_total", POOL),
                    "preempted",
                ),
            ],
        ),
        Row(
            "Weights",
            [
                by_label(
                    "Time to new weights p95, by source",
                    quantile(0.95, f"{SAMPLER}_weights_duration_seconds", POOL, "source"),
                    "source",
                    "s",
                ),
                spread(
                    "Staleness of sequences, in steps", f"{SAMPLER}_staleness_steps", POOL, "short"
                ),
                Plot(
                    "Loads and in-flight updates each second",
                    [
                        Query(
                            rate(f"{SAMPLER}_weight_loads_total", POOL, "source"),
                            "loaded for a {{source}}",
                        ),
                        Query(
                            rate(f"{SAMPLER}_weight_updates_total", POOL), "updated between tokens"
                        ),
                    ],
                ),
                by_label(
                    "Why a sampler was chosen",
                    rate(f"{GATEWAY}_sampler_choices_total", by="reason"),
                    "reason",
                ),
                one(
                    "Restarts of engines",
                    f"sum(increase({SAMPLER}_engine_restarts_total{{{POOL}}}[$__range]))",
                    "restarts",
                ),
            ],
        ),
    ],
)


STORAGE = Dashboard(
    "tinsmith-storage",
    "Tinsmith: storage and durability",
    "Ledger, object store, disks, leases, replays, certificates.",
    ("pool",),
    [
        Row(
            "Ledger",
            [
                spread(
                    "Group commit",
                    "tinsmith_ledger_commit_duration_seconds",
                    POOL,
                    limit_of="TinsmithLedgerSlow",
                ),
                one(
                    "Writes that share a commit",
                    mean("tinsmith_ledger_commit_writes", POOL),
                    "writes",
                ),
                one(
                    "Writes that wait",
                    total("tinsmith_ledger_waiting_writes", POOL),
                    "writes",
                    limit_of="TinsmithLedgerBacklog",
                ),
                one(
                    "Age of leases",
                    f"max by (instance) ({TRAINER}_lease_age_seconds{{{POOL}}})",
                    "{{instance}}",
                    "s",
                    limit_of="TinsmithLeaseOld",
                ),
                by_label(
                    "Replayed operations",
                    rate(f"{TRAINER}_replayed_operations_total", POOL, "outcome"),
                    "outcome",
                ),
                spread("From the engine to durable", f"{TRAINER}_commit_duration_seconds", POOL),
            ],
        ),
        Row(
            "Object store",
            [
                by_label(
                    "Requests each second",
                    rate("tinsmith_object_store_request_duration_seconds_count", POOL, "operation"),
                    "operation",
                ),
                by_label(
                    "Requests by outcome",
                    rate("tinsmith_object_store_request_duration_seconds_count", POOL, "outcome"),
                    "outcome",
                ),
                one(
                    "p95 by operation",
                    quantile(
                        0.95, "tinsmith_object_store_request_duration_seconds", POOL, "operation"
                    ),
                    "{{operation}}",
                    "s",
                    limit_of="TinsmithObjectStoreSlow",
                ),
                by_label(
                    "Bytes each second",
                    rate("tinsmith_object_store_bytes_total", POOL, "direction"),
                    "direction",
                    "Bps",
                ),
                one(
                    "Snapshots, bytes each second",
                    rate(f"{TRAINER}_snapshot_bytes_total", POOL),
                    "snapshots",
                    "Bps",
                ),
                by_label(
                    "Copies, exports and imports",
                    rate(f"{TRAINER}_checkpoint_tasks_total", POOL, "kind, outcome"),
                    "kind}} {{outcome",
                ),
            ],
        ),
        Row(
            "Space and time",
            [
                Plot(
                    "Disk of trainers",
                    [
                        Query(
                            f"min by (instance) ({TRAINER}_data_free_bytes{{{POOL}}})",
                            "{{instance}} free",
                        ),
                        Query(
                            f"max by (instance) ({TRAINER}_data_size_bytes{{{POOL}}})",
                            "{{instance}} size",
                        ),
                    ],
                    "bytes",
                ),
                Plot(
                    "What expired, each second",
                    [
                        Query(rate(f"{TRAINER}_expired_total", POOL, "what"), "{{what}}"),
                        Query(rate(f"{TRAINER}_expired_checkpoints_total", POOL), "checkpoint"),
                    ],
                ),
                Plot(
                    "Time left",
                    [
                        Query(
                            "min by (use) (tinsmith_certificate_expiry_timestamp_seconds) - time()",
                            "certificate of {{use}}",
                        ),
                        Query(
                            f"min({SCHEDULER}_next_key_expiry_timestamp_seconds) - time()",
                            "next key",
                        ),
                    ],
                    "s",
                    limit_of="TinsmithCertificateExpires",
                ),
            ],
        ),
    ],
)
