"""What operators look at first: the cluster, and what each project uses of it."""

from __future__ import annotations

from helm.observability.expressions import POOL, PROJECT, quantile, rate, ratio, total
from helm.observability.panels import Dashboard, Plot, Query, Row
from helm.observability.plots import GATEWAY, RUN, SAMPLER, SCHEDULER, TRAINER, by_label, one

CLUSTER = Dashboard(
    "tinsmith-cluster",
    "Tinsmith: cluster",
    "Is it up, how much goes through it, who waits.",
    ("pool",),
    [
        Row(
            "Pods",
            [
                by_label("Workers alive", f"max by (role) ({SCHEDULER}_workers)", "role"),
                one(
                    "Pods that answer Prometheus",
                    'sum by (job) (up{job=~".*tinsmith.*"})',
                    "{{job}}",
                    note="Fewer than pods that run: one starts, is down, or hangs.",
                ),
                one(
                    "Memory by pod",
                    'process_resident_memory_bytes{job=~".*tinsmith.*"}',
                    "{{pod}} {{instance}}",
                    "bytes",
                    "A line that only rises towards the limit of the pod ends in a restart.",
                ),
                one(
                    "CPU by pod",
                    'rate(process_cpu_seconds_total{job=~".*tinsmith.*"}[$__rate_interval])',
                    "{{instance}}",
                    note="Cores in use; at the limit of the pod everything waits.",
                ),
                by_label(
                    "Pods by version",
                    "count by (version) (tinsmith_build_info)",
                    "version",
                ),
                one("Sessions", f"max({SCHEDULER}_active_sessions)", "active"),
                by_label(
                    "Sessions that ended",
                    rate(f"{SCHEDULER}_ended_sessions_total", by="state"),
                    "state",
                ),
            ],
        ),
        Row(
            "Throughput",
            [
                Plot(
                    "Tokens each second",
                    [
                        Query(rate(f"{TRAINER}_trained_tokens_total", POOL), "trained"),
                        Query(rate(f"{SAMPLER}_sampled_tokens_total", POOL), "sampled"),
                        Query(rate(f"{SAMPLER}_prompt_tokens_total", POOL), "prompts"),
                    ],
                ),
                by_label(
                    "How busy the engines are",
                    rate(f"{TRAINER}_engine_seconds_total", POOL, "part"),
                    "part",
                    "percentunit",
                ),
                Plot(
                    "Runs",
                    [
                        Query(total(f"{TRAINER}_resident_runs", POOL), "in memory"),
                        Query(f"max({SCHEDULER}_waiting_runs)", "wait for a trainer"),
                        Query(f"max({SCHEDULER}_moving_runs)", "move"),
                    ],
                ),
            ],
        ),
        Row(
            "Calls",
            [
                by_label(
                    "Calls each second",
                    rate("tinsmith_rpc_duration_seconds_count", POOL, "code"),
                    "code",
                ),
                by_label(
                    "p99 by method",
                    quantile(0.99, "tinsmith_rpc_duration_seconds", POOL, "method"),
                    "method",
                    "s",
                ),
                by_label(
                    "Errors by reason", rate("tinsmith_rpc_errors_total", POOL, "reason"), "reason"
                ),
                by_label(
                    "Calls in flight", total("tinsmith_rpc_in_flight", POOL, "method"), "method"
                ),
                by_label(
                    "Refused because of limits",
                    rate("tinsmith_rpc_limited_total", POOL, "what"),
                    "what",
                ),
                Plot(
                    "Requests in flight",
                    [
                        Query(total("tinsmith_rpc_requests_in_flight", POOL), "requests"),
                        Query(f"{total('tinsmith_rpc_bytes_in_flight', POOL)} / 1048576", "MiB"),
                    ],
                ),
            ],
        ),
        Row(
            "Gateway",
            [
                by_label(
                    "HTTP requests each second",
                    rate(f"{GATEWAY}_http_request_duration_seconds_count", by="endpoint"),
                    "endpoint",
                ),
                by_label(
                    "HTTP p95 by endpoint",
                    quantile(0.95, f"{GATEWAY}_http_request_duration_seconds", by="endpoint"),
                    "endpoint",
                    "s",
                ),
                by_label(
                    "HTTP errors", rate(f"{GATEWAY}_http_errors_total", by="reason"), "reason"
                ),
                by_label(
                    "gRPC p95 through the gateway",
                    quantile(0.95, f"{GATEWAY}_native_call_duration_seconds", by="method"),
                    "method",
                    "s",
                ),
                by_label(
                    "gRPC errors of the gateway",
                    rate(f"{GATEWAY}_native_errors_total", by="reason"),
                    "reason",
                ),
                by_label(
                    "OpenAI tokens each second",
                    rate(f"{GATEWAY}_openai_tokens_total", by="kind"),
                    "kind",
                ),
                by_label("Connections", total(f"{GATEWAY}_connections", by="protocol"), "protocol"),
                by_label(
                    "Refused connections",
                    rate(f"{GATEWAY}_refused_connections_total", by="reason"),
                    "reason",
                ),
                Plot(
                    "Odds and ends",
                    [
                        Query(
                            rate(f"{GATEWAY}_rerouted_calls_total"), "calls sent to a second pod"
                        ),
                        Query(rate("tinsmith_confined_ends_total"), "confined processes ended"),
                        Query(
                            total(f"{GATEWAY}_pending_samples"),
                            "samples that Tinker clients wait for",
                        ),
                    ],
                ),
            ],
        ),
    ],
)


PROJECT_USE = Dashboard(
    "tinsmith-project",
    "Tinsmith: project",
    "What each project uses, and what it waits for.",
    ("project",),
    [
        Row(
            "Use",
            [
                by_label(
                    "Trained tokens each second",
                    rate(f"{RUN}_trained_tokens_total", PROJECT, "project"),
                    "project",
                ),
                by_label(
                    "Sampled tokens each second",
                    rate(f"{RUN}_sampled_tokens_total", PROJECT, "project"),
                    "project",
                ),
                by_label(
                    "Part of the engines",
                    rate(f"{RUN}_engine_seconds_total", PROJECT, "project"),
                    "project",
                    "percentunit",
                ),
                by_label(
                    "Runs with activity",
                    f"count by (project) ({RUN}_version{{{PROJECT}}})",
                    "project",
                ),
                by_label(
                    "Optimizer steps each second",
                    rate(f"{RUN}_steps_total", PROJECT, "project"),
                    "project",
                ),
                by_label(
                    "Sequences each second",
                    rate(f"{RUN}_sampled_sequences_total", PROJECT, "project"),
                    "project",
                ),
            ],
        ),
        Row(
            "Trouble",
            [
                by_label(
                    "Wait of an operation",
                    ratio(
                        rate(f"{RUN}_queue_wait_seconds_total", PROJECT, "project"),
                        rate(f"{RUN}_operations_total", PROJECT, "project"),
                    ),
                    "project",
                    "s",
                ),
                one(
                    "Failed operations by reason",
                    rate(f"{RUN}_failed_operations_total", PROJECT, "project, reason"),
                    "{{project}} {{reason}}",
                ),
                one(
                    "Operations by outcome",
                    rate(f"{RUN}_operations_total", PROJECT, "project, outcome"),
                    "{{project}} {{outcome}}",
                ),
            ],
        ),
    ],
)
