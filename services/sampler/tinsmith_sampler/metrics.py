"""Metrics of the sampler pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

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
