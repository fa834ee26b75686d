"""Alerts about the service: queues, leases, stores, disks, certificates, environments, jobs."""

from __future__ import annotations

from collections.abc import Sequence

from helm.observability.alerts import TEAM_SERVICE, Alert

_DAY_S = 86_400
_POD = "{{ $labels.instance }}"
_STORE = "tinsmith_object_store_request_duration_seconds"


def _stuck(waiting: str, done: str, window: str) -> str:
    """Return pods where something waits and nothing was done."""
    return (
        f"sum by (instance) ({waiting}) > 0 "
        f"unless on (instance) sum by (instance) (increase({done}[{window}])) > 0"
    )


SERVICE_ALERTS: Sequence[Alert] = (
    Alert(
        name="TinsmithPodDown",
        expression='up{job=~".*tinsmith.*"} == 0',
        lasts="3m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"{_POD} does not answer Prometheus.",
        means="The pod is down, starts, or hangs.",
        remedy="`kubectl describe pod` and its log; runs of a lost trainer move by "
        "themselves where "
        "PostgreSQL is shared.",
    ),
    Alert(
        name="TinsmithInternalErrors",
        expression="sum by (method) "
        '(rate(tinsmith_rpc_duration_seconds_count{code="INTERNAL"}[5m]))'
        " > 0",
        lasts="2m",
        severity="warning",
        team=TEAM_SERVICE,
        says="{{ $labels.method }} fails by a bug.",
        means="`INTERNAL` is never a caller's mistake.",
        remedy="Search the pod's log for `call failed by a bug`; it has the trace and the "
        "request id.",
    ),
    Alert(
        name="TinsmithTrainerQueueStuck",
        expression=_stuck(
            "tinsmith_trainer_queued_operations", "tinsmith_trainer_operations_total", "5m"
        ),
        lasts="2m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"{_POD} has queued operations and ends none.",
        means="The engine hangs, the disk is full, the lease is not renewed, or a number is "
        "missing.",
        remedy="`tinsmith runs list` says what each run waits for; compare waiting runs by reason.",
    ),
    Alert(
        name="TinsmithTrainerStarved",
        expression="sum by (instance) (rate(tinsmith_trainer_engine_seconds_total[3m])) < 0.02 "
        "and on (instance) sum by (instance) (tinsmith_trainer_resident_runs) > 0 "
        "and on (instance) sum by (instance) (tinsmith_trainer_queued_operations) == 0 "
        "and on () sum(tinsmith_sampler_waiting_sequences) > 0",
        lasts="2m",
        severity="info",
        team=TEAM_SERVICE,
        says=f"The engine of {_POD} is busy {{{{ $value | humanizePercentage }}}} of the "
        "time, while "
        "samples are waited for.",
        means="Training waits for rollouts.",
        remedy="Add samplers or environments, or let loops train while they sample (off-by-k).",
    ),
    Alert(
        name="TinsmithSamplerQueueStuck",
        expression=_stuck(
            "tinsmith_sampler_waiting_sequences", "tinsmith_sampler_sequences_total", "15m"
        ),
        lasts="2m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"{_POD} has unfinished sequences and ends none.",
        means="The sampling engine hangs, or answers take longer than a quarter of an hour.",
        remedy="Look at the pod's log and at restarts of its engine; a restart loses no result, "
        "because samples are sent again by seed.",
    ),
    Alert(
        name="TinsmithRunsUnplaced",
        expression="max(tinsmith_scheduler_waiting_runs) > 0",
        lasts="5m",
        severity="warning",
        team=TEAM_SERVICE,
        says="{{ $value }} runs wait for a trainer.",
        means="No trainer of their base model is alive or has room.",
        remedy="`tinsmith runs list` says what each waits for; add a pool or raise `max_runs`.",
    ),
    Alert(
        name="TinsmithEnvironmentStuck",
        expression=_stuck(
            "tinsmith_environment_active_instances",
            "tinsmith_environment_step_duration_seconds_count",
            "4m",
        ),
        lasts="2m",
        severity="warning",
        team=TEAM_SERVICE,
        says=f"{_POD} has live episodes and takes no step.",
        means="Environments hang, or what plays them is gone.",
        remedy="Compare step p95 with the time limit; look at samplers: agents may wait for "
        "tokens.",
    ),
    Alert(
        name="TinsmithEnvironmentFailures",
        expression="sum by (environment) (rate(tinsmith_environment_failures_total[5m])) / "
        "sum by (environment) (rate(tinsmith_environment_reset_duration_seconds_count[5m])) > 0.1",
        lasts="3m",
        severity="warning",
        team=TEAM_SERVICE,
        says="{{ $value | humanizePercentage }} of the episodes of {{ $labels.environment }} "
        "are lost.",
        means="Instances raise, run out of time or crash. They are replaced and never scored 0.",
        remedy="The log of the environment pod has the trace of each.",
    ),
    Alert(
        name="TinsmithDeadEpisodes",
        expression='sum by (type) (increase(tinsmith_coordinator_ended_episodes_total{state="dead"}'
        "[15m])) > 0",
        lasts="0m",
        severity="warning",
        team=TEAM_SERVICE,
        says="Episodes of type {{ $labels.type }} failed four times and are given up.",
        means="Agents die or do not submit.",
        remedy="Look at lost attempts by cause: `expired` is a dead agent, `aborted` an "
        "agent's own "
        "word.",
    ),
    Alert(
        name="TinsmithMatchLimits",
        expression="sum by (limit) (increase(tinsmith_coordinator_expired_limits_total[15m])) > 3",
        lasts="0m",
        severity="info",
        team=TEAM_SERVICE,
        says="Members of matches do not keep the time of a {{ $labels.limit }}.",
        means="A program of a seat died or is too slow; the policy of the match decides what "
        "follows.",
        remedy="docs/matches.md has the policies; look at the members that were dropped.",
    ),
    Alert(
        name="TinsmithLeaseOld",
        expression="max by (instance) (tinsmith_trainer_lease_age_seconds) > 9",
        lasts="0m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"The lease of {_POD} is {{{{ $value | humanizeDuration }}}} old.",
        means="The trainer cannot renew it, and computes nothing until it can. After `lease_ttl_s` "
        "others take its runs.",
        remedy="Look at the database: its connections, its disk, its standby.",
    ),
    Alert(
        name="TinsmithLedgerSlow",
        expression="histogram_quantile(0.99, sum by (le, instance) "
        "(rate(tinsmith_ledger_commit_duration_seconds_bucket[5m]))) > 0.4",
        lasts="5m",
        severity="warning",
        team=TEAM_SERVICE,
        says=f"Commits of {_POD} take {{{{ $value | humanizeDuration }}}} at the 99th percentile.",
        means="Every acknowledgement waits for one.",
        remedy="Look at the disk of the database and at its synchronous standby.",
    ),
    Alert(
        name="TinsmithLedgerBacklog",
        expression="max by (instance) (min_over_time(tinsmith_ledger_waiting_writes[5m])) > 100",
        lasts="2m",
        severity="warning",
        team=TEAM_SERVICE,
        says=f"{{{{ $value }}}} writes wait at {_POD}.",
        means="The database cannot keep up.",
        remedy="Look at commits: slow ones are the disk, many are load; spread runs over trainers.",
    ),
    Alert(
        name="TinsmithDiskLow",
        expression="min by (instance) (tinsmith_trainer_data_free_bytes / "
        "tinsmith_trainer_data_size_bytes) < 0.1",
        lasts="2m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"The disk of {_POD} has {{{{ $value | humanizePercentage }}}} left.",
        means="When it is full, acknowledged work waits, and new work is refused.",
        remedy="Enlarge the volume; shorten retention of results and snapshots.",
    ),
    Alert(
        name="TinsmithObjectStoreErrors",
        expression=f"sum by (outcome) "
        f'(rate({_STORE}_count{{outcome=~"unavailable|refused|full|failed"}}'
        "[5m])) > 0",
        lasts="2m",
        severity="critical",
        team=TEAM_SERVICE,
        says="Requests to the object store end {{ $labels.outcome }}.",
        means="`unavailable`: it does not answer. `refused`: credentials or rights. `full`: "
        "no room.",
        remedy="Runs wait and go on when it is back; check endpoint, credentials and quota.",
    ),
    Alert(
        name="TinsmithObjectStoreSlow",
        expression=f"histogram_quantile(0.95, sum by (le, operation) (rate({_STORE}_bucket"
        '{outcome="ok"}[5m]))) > 10',
        lasts="5m",
        severity="warning",
        team=TEAM_SERVICE,
        says="{{ $labels.operation }} takes {{ $value | humanizeDuration }} at the object store.",
        means="Snapshots, restores and loads of weights are slow.",
        remedy="Compare bytes each second with what the store and the network can do.",
    ),
    Alert(
        name="TinsmithCertificateExpires",
        expression="min by (instance, use) (tinsmith_certificate_expiry_timestamp_seconds) - "
        "time() "
        f"< {7 * _DAY_S}",
        lasts="0m",
        severity="critical",
        team=TEAM_SERVICE,
        says=f"The certificate of {_POD} ({{{{ $labels.use }}}}) ends in "
        "{{ $value | humanizeDuration }}.",
        means="It should have been renewed: pods refuse each other when it ends.",
        remedy="Look at cert-manager's Certificate, or make new ones (docs/tls.md); pods read them "
        "while they run.",
    ),
    Alert(
        name="TinsmithKeyExpires",
        expression="min(tinsmith_scheduler_next_key_expiry_timestamp_seconds) - time() "
        f"< {3 * _DAY_S}",
        lasts="0m",
        severity="info",
        team=TEAM_SERVICE,
        says="A key of a user expires in {{ $value | humanizeDuration }}.",
        means="Its loops will be refused from then on.",
        remedy="`tinsmith keys list` names it; make another one and hand it over before.",
    ),
    Alert(
        name="TinsmithEngineRestarts",
        expression="sum by (instance) (increase(tinsmith_sampler_engine_restarts_total[30m])) > 1",
        lasts="0m",
        severity="warning",
        team=TEAM_SERVICE,
        says=f"The sampling engine of {_POD} restarted {{{{ $value | humanize }}}} times.",
        means="vLLM's process crashes.",
        remedy="Its log says why; GPU memory is the usual cause.",
    ),
    Alert(
        name="TinsmithControllerWithoutLeader",
        expression="sum(tinsmith_controller_is_leader) == 0",
        lasts="2m",
        severity="critical",
        team=TEAM_SERVICE,
        says="No replica of the controller leads.",
        means="Jobs and pools do not move; what runs goes on.",
        remedy="Look at the Lease in the controller's namespace and at its access to the API "
        "server.",
    ),
    Alert(
        name="TinsmithControllerFails",
        expression="sum by (kind) "
        '(rate(tinsmith_controller_reconciles_total{outcome="failed"}[5m]))'
        " > 0",
        lasts="5m",
        severity="warning",
        team=TEAM_SERVICE,
        says="Looks at a {{ $labels.kind }} fail again and again.",
        means="A request to the API server is refused, or there is a bug.",
        remedy="The controller's log names the workload and has the trace.",
    ),
    Alert(
        name="TinsmithJobsWait",
        expression="max by (queue) (tinsmith_controller_waiting_jobs) > 0",
        lasts="30m",
        severity="info",
        team=TEAM_SERVICE,
        says="{{ $value }} jobs of queue {{ $labels.queue }} wait for nodes.",
        means="The queue or the cluster is full, or a gang fits nowhere.",
        remedy="`tinsmith jobs list` says what each waits for.",
    ),
)
