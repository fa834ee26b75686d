"""Metrics of the coordinator pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OPEN_EPISODES = Gauge(
    "tinsmith_coordinator_open_episodes", "Episodes that have not ended, by state.", ["state"]
)
REGISTERED_EPISODES = Counter(
    "tinsmith_coordinator_registered_episodes_total", "Episodes that were registered."
)
ENDED_EPISODES = Counter(
    "tinsmith_coordinator_ended_episodes_total",
    "Episodes that ended: submitted, dead or cancelled.",
    ["type", "state"],
)
CLAIMS = Counter(
    "tinsmith_coordinator_claims_total",
    "Answers to claims: given, repeated, none, throttled.",
    ["answer"],
)
CLAIM_SECONDS = Histogram(
    "tinsmith_coordinator_claim_duration_seconds",
    "Time of one look for an episode, without the wait for one to come.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
LOST_ATTEMPTS = Counter(
    "tinsmith_coordinator_lost_attempts_total",
    "Attempts that came to nothing: expired or aborted.",
    ["cause"],
)
FENCED_CALLS = Counter(
    "tinsmith_coordinator_fenced_calls_total",
    "Calls of holders whose attempt was over, by reason.",
    ["reason"],
)
CREATED_MATCHES = Counter(
    "tinsmith_coordinator_created_matches_total", "Matches that were created."
)
ENDED_MATCHES = Counter(
    "tinsmith_coordinator_ended_matches_total",
    "Matches that ended: completed, aborted or cancelled.",
    ["state"],
)
OPENED_BARRIERS = Counter(
    "tinsmith_coordinator_opened_barriers_total", "Barriers of matches that opened."
)
TURNS = Counter("tinsmith_coordinator_turns_total", "Moves in games of matches.")
EXPIRED_LIMITS = Counter(
    "tinsmith_coordinator_expired_limits_total",
    "Time limits of matches that were not kept: of a seat, a barrier or a turn.",
    ["limit"],
)
RECORDED_CALLS = Counter(
    "tinsmith_coordinator_recorded_model_calls_total", "Samples that were recorded."
)
RECORDED_BYTES = Counter(
    "tinsmith_coordinator_recorded_bytes_total", "Bytes of recorded model calls."
)
ROLLOUT_BATCHES = Counter(
    "tinsmith_coordinator_rollout_batches_total",
    "Batches of rollouts: created, completed or failed.",
    ["event"],
)
PLAYING_EPISODES = Gauge(
    "tinsmith_coordinator_playing_episodes", "Episodes of rollouts that are played."
)
PLAYED_EPISODES = Counter(
    "tinsmith_coordinator_played_episodes_total",
    "Plays of rollouts that ended: finished, or the reason of the failure.",
    ["outcome"],
)
ROLLOUT_TOKENS = Counter(
    "tinsmith_coordinator_rollout_sampled_tokens_total", "Tokens that rollouts sampled."
)
