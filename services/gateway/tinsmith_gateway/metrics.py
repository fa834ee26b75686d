"""Metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

HTTP_SECONDS = Histogram(
    "tinsmith_gateway_http_request_duration_seconds",
    "Wall time of one HTTP request, by endpoint and status; long polls included.",
    ["endpoint", "status"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
HTTP_ERRORS = Counter(
    "tinsmith_gateway_http_errors_total",
    "HTTP requests that failed, by endpoint and reason.",
    ["endpoint", "reason"],
)
OPENAI_TOKENS = Counter(
    "tinsmith_gateway_openai_tokens_total",
    "Tokens of OpenAI clients, by kind: `prompt` or `sampled`.",
    ["kind"],
)
