"""Metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

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
PENDING_SAMPLES = Gauge(
    "tinsmith_gateway_pending_samples", "Samples of the Tinker wire that have not ended."
)
NATIVE_SECONDS = Histogram(
    "tinsmith_gateway_native_call_duration_seconds",
    "Wall time of one gRPC call that was passed through, by method and status code.",
    ["method", "code"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
NATIVE_ERRORS = Counter(
    "tinsmith_gateway_native_errors_total",
    "gRPC calls that the gateway itself refused, by method and reason.",
    ["method", "reason"],
)
REROUTED_CALLS = Counter(
    "tinsmith_gateway_rerouted_calls_total",
    "gRPC calls that were sent to a second pod because their resource had moved.",
)
SAMPLER_CHOICES = Counter(
    "tinsmith_gateway_sampler_choices_total",
    "Samples by why their sampler was chosen; the reasons are those of `SamplerChoice`.",
    ["reason"],
)
CONNECTIONS = Gauge("tinsmith_gateway_connections", "Open connections, by protocol.", ["protocol"])
REFUSED_CONNECTIONS = Counter(
    "tinsmith_gateway_refused_connections_total",
    "Connections that were dropped before a request, by reason.",
    ["reason"],
)
