"""Metrics of the sampler pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tinsmith_runtime.observability.run_series import RUN_LABELS

SAMPLED_TOKENS = Counter("tinsmith_sampler_sampled_tokens_total", "Tokens sampled.")
PROMPT_TOKENS = Counter("tinsmith_sampler_prompt_tokens_total", "Tokens of prompts.")
SEQUENCES = Counter("tinsmith_sampler_sequences_total", "Sequences that ended.", ["stop_reason"])
WAITING_SEQUENCES = Gauge("tinsmith_sampler_waiting_sequences", "Sequences accepted, not ended.")
REQUEST_SECONDS = Histogram(
    "tinsmith_sampler_request_duration_seconds",
    "Wall time of one request, from its arrival to its last token.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
WEIGHT_LOADS = Counter("tinsmith_sampler_weight_loads_total", "Weights loaded.", ["source"])
CACHED_PROMPT_TOKENS = Counter(
    "tinsmith_sampler_cached_prompt_tokens_total",
    "Tokens of prompts that were not computed again, because an earlier request had them.",
)
WEIGHT_UPDATES = Counter(
    "tinsmith_sampler_weight_updates_total",
    "Times that a request went on with newer weights between two tokens.",
)
OPEN_STREAMS = Gauge("tinsmith_sampler_open_streams", "Streams of tokens that are being read.")
KV_CACHE_BYTES = Gauge(
    "tinsmith_sampler_kv_cache_bytes",
    "Memory that keys and values may take; it is never passed.",
    ["base_model"],
)
ENGINE_RESTARTS = Counter(
    "tinsmith_sampler_engine_restarts_total",
    "Times that the process of an engine was started again after its end.",
)
KV_CACHE_USED_BYTES = Gauge(
    "tinsmith_sampler_kv_cache_used_bytes",
    "Memory of keys and values that sequences hold; known prompts that can be let go of are not "
    "counted.",
    ["base_model"],
)
PREEMPTIONS = Counter(
    "tinsmith_sampler_preemptions_total",
    "Sequences that gave their blocks up to others, and are read again later.",
)
FIRST_TOKEN_SECONDS = Histogram(
    "tinsmith_sampler_time_to_first_token_seconds",
    "Time from a streamed request's arrival to its first token.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
OUTPUT_TOKEN_SECONDS = Histogram(
    "tinsmith_sampler_time_per_output_token_seconds",
    "Wall time of a request by token of its longest sequence.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
WEIGHTS_SECONDS = Histogram(
    "tinsmith_sampler_weights_duration_seconds",
    "Time until the weights that a request asks for are at hand, by source: of a live `run`, of a "
    "`checkpoint`, or of the `base` model.",
    ["source"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
STALENESS = Histogram(
    "tinsmith_sampler_staleness_steps",
    "Optimizer steps that the oldest token of a sequence lies behind its run.",
    buckets=(0, 1, 2, 4, 8, 16, 32),
)

# By run, of the runs that were sampled last.

RUN_SAMPLED_TOKENS = Counter(
    "tinsmith_run_sampled_tokens_total", "Tokens sampled from the run's weights.", RUN_LABELS
)
RUN_SAMPLED_SEQUENCES = Counter(
    "tinsmith_run_sampled_sequences_total",
    "Sequences sampled from the run's weights that ended, by reason.",
    [*RUN_LABELS, "stop_reason"],
)
RUN_STALENESS = Gauge(
    "tinsmith_run_staleness_steps",
    "Optimizer steps that the oldest token of the last sequence lies behind the run.",
    RUN_LABELS,
)
