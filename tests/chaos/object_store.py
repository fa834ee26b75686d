"""The object store answers 503, is cut off in the middle of requests and answers, and goes away.

Weights, snapshots and checkpoints go through a proxy to an S3 server. Small operations must go on
meanwhile; what needs the store waits. In the end every manifest in the store is read against its
files, past the proxy.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import time
from collections.abc import Iterator

from tests.chaos.cluster import Cluster
from tests.chaos.ledger_view import LedgerView
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import POSTGRES_SETTINGS, Setting
from tests.chaos.tenants import Tenant, Tenants, compare, reinforced, supervised
from tests.fakes.postgres import new_server
from tests.fakes.s3_server import CREDENTIALS, S3Server, running_s3_server
from tests.faults.proxy import Fault, HttpFaultProxy
from tinsmith_runtime import storage
from tinsmith_runtime.errors import CheckpointCorruptError
from tinsmith_runtime.storage import checkpoint_manifests
from tinsmith_runtime.storage.checkpoint_manifests import MANIFEST_NAME

_DATABASE = "tinsmith"
_BUCKET = "chaos"
_MAX_PAUSE_S = 0.7
_KINDS = ("503", "cut request", "cut answer", "lost answer", "outage")


def run(setting: Setting) -> Findings:
    """Disturb the store, and compare with a calm run on the same pods."""
    num_faults = 300 if setting.is_long else 20
    struck: collections.Counter[str] = collections.Counter()
    postgres = new_server(POSTGRES_SETTINGS)
    try:
        url = postgres.create_database(_DATABASE)
        with (
            running_s3_server() as server,
            HttpFaultProxy("127.0.0.1", server.port) as proxy,
            _credentials(),
        ):
            server.create_bucket(_BUCKET)
            with Cluster(
                setting.folder / "pods",
                setting.model_dir,
                database_url=url,
                storage_uri=_uri(proxy.endpoint),
                num_samplers=1,
                # Often, so that faults meet them.
                settings={"trainer": {"snapshot_replay_s": 0.5, "s3_timeout_s": 5}},
            ) as cluster:
                setting.say("the pods serve")
                view = LedgerView(postgres, _DATABASE)
                rows = _disturb(setting, cluster, view, proxy, num_faults, struck)
            rows += _check_store(server)
            num_requests = len(proxy.requests)
    finally:
        postgres.remove()
    return Findings(rows, {"faults": dict(sorted(struck.items())), "requests": num_requests})


def _disturb(
    setting: Setting,
    cluster: Cluster,
    view: LedgerView,
    proxy: HttpFaultProxy,
    num_faults: int,
    struck: collections.Counter[str],
) -> list[Row]:
    chance = random.Random(setting.seed)
    tenants = Tenants(
        cluster, [Tenant("reading", supervised, 41), Tenant("playing", reinforced, 42)]
    )
    tenants.start()
    num_finished_away = 0
    try:
        while struck.total() < num_faults and not tenants.is_broken:
            time.sleep(chance.uniform(0.05, _MAX_PAUSE_S))
            kind = chance.choice(_KINDS)
            before = view.num_finished()
            _strike(proxy, kind, chance)
            if kind == "outage":
                num_finished_away += view.num_finished() - before
            struck[kind] += 1
            if struck.total() % 10 == 0:
                setting.say(f"{struck.total()} faults, {view.num_finished()} operations finished")
    finally:
        proxy.clear()
        disturbed = tenants.join()
    setting.say("the tenants have every result; now the calm run")
    calm = tenants.repeat(disturbed)
    return [
        Row(name="faults", value=struck.total(), target=num_faults),
        Row(
            name="operations finished while the store was away",
            value=num_finished_away,
            target=1,
            better="higher",
        ),
        *view.check([training.run for training in disturbed.values()]),
        *compare(calm, disturbed),
    ]


def _strike(proxy: HttpFaultProxy, kind: str, chance: random.Random) -> None:
    match kind:
        case "503":
            proxy.add(Fault(status=503, times=chance.randint(1, 4)))
        case "cut request":
            proxy.add(Fault(cut_request_after=chance.randrange(20_000), times=1))
        case "cut answer":
            proxy.add(Fault(cut_response_after=chance.randrange(1, 20_000), times=1))
        case "lost answer":
            proxy.add(Fault(cut_response_after=0, times=1))
        case _:
            with proxy.outage():
                time.sleep(chance.uniform(0.5, 2.0))


def _check_store(server: S3Server) -> list[Row]:
    """Read every manifest against its files."""
    store = storage.open(_uri(server.endpoint))
    paths = [each.path for each in store.list_folder("")]
    folders = [path.rpartition("/")[0] for path in paths if path.endswith(f"/{MANIFEST_NAME}")]
    num_wrong = 0
    for folder in folders:
        try:
            checkpoint_manifests.verify_checkpoint(store, folder)
        except CheckpointCorruptError:
            num_wrong += 1
    return [
        Row(name="manifests in the store", value=len(folders), target=1, better="higher"),
        Row(name="manifests that do not match their files", value=num_wrong, target=0),
    ]


def _uri(endpoint: str) -> str:
    return f"s3://{_BUCKET}/store?endpoint={endpoint}&region=us-east-1&path_style=true"


@contextlib.contextmanager
def _credentials() -> Iterator[None]:
    os.environ.update(CREDENTIALS)
    try:
        yield
    finally:
        for name in CREDENTIALS:
            del os.environ[name]
