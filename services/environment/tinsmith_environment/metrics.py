"""Metrics of the environment pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, Summary

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

STEP_SECONDS = Histogram(
    "tinsmith_environment_step_duration_seconds",
    "Time of one step, the wait for its worker included.",
    ["environment", "outcome"],
    buckets=_BUCKETS,
)
RESET_SECONDS = Histogram(
    "tinsmith_environment_reset_duration_seconds",
    "Time of the creation of one instance.",
    ["environment", "outcome"],
    buckets=_BUCKETS,
)
ACTIVE_INSTANCES = Gauge("tinsmith_environment_active_instances", "Episodes that are played.")
EPISODES = Counter(
    "tinsmith_environment_episodes_total",
    "Episodes that ended: finished, failed, abandoned.",
    ["environment", "outcome"],
)
EPISODE_REWARD = Summary(
    "tinsmith_environment_episode_reward",
    "Sum of the rewards of an episode that was played to its end.",
    ["environment"],
)
FAILURES = Counter(
    "tinsmith_environment_failures_total",
    "Episodes that were lost, by cause: raised, timeout, crashed.",
    ["environment", "cause"],
)
EXPIRED_INSTANCES = Counter(
    "tinsmith_environment_expired_instances_total", "Instances removed because nobody used them."
)
WORKER_RESTARTS = Counter(
    "tinsmith_environment_worker_restarts_total", "Worker processes replaced.", ["cause"]
)
WORKER_START_SECONDS = Histogram(
    "tinsmith_environment_worker_start_duration_seconds",
    "Time from the wish for a worker process until it takes calls.",
    buckets=_BUCKETS,
)
