"""System calls of the embedded server: an acknowledgement is sent after the sync of its ledger.

`strace` lists what the server receives, syncs and sends, in order. Between the arrival of a request
and the answer with its operation, a sync of the ledger's log must have begun and ended.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tinsmith
from tests.chaos.cluster import BASE_MODEL
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Setting
from tests.chaos.server_process import WatchedServer
from tests.chaos.tenants import supervised_datum

_CALLS = "fsync,fdatasync,read,readv,recvfrom,recvmsg,write,writev,sendto,sendmsg"
_RECEIVES = ("read", "readv", "recvfrom", "recvmsg")
_SENDS = ("write", "writev", "sendto", "sendmsg")
_MAX_STRING_BYTES = 16384
_ATTACH_TIMEOUT_S = 30.0
_POLL_S = 0.05
_LINE_PATTERN = re.compile(r"(?P<pid>\d+) +(?:<\.\.\. )?(?P<call>\w+)(?P<rest>.*)")
_LOG_PATTERN = re.compile(r"\(\d+<[^>]*/trainer\.db-wal>")
_SOCKET_PATTERN = re.compile(r"\((?P<socket>\d+<[^>]*>)")
_STRING_PATTERN = re.compile(r'"((?:[^"\\]|\\.)*)"')
_KEPT_CHARACTERS = 400
"""Of what was read: more than a run's name and a request id take as strace writes them."""
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"


def run(setting: Setting) -> Findings:
    """Submit one operation after another under strace."""
    num_submits = 200 if setting.is_long else 30
    name = "acknowledgements that were sent before their sync"
    if shutil.which("strace") is None:
        return Findings([Row(name=name, value=None, target=0, note="strace is not installed")])
    trace_path = setting.folder / "trace"
    server = WatchedServer(setting.folder / "server", setting.model_dir)
    server.start()
    try:
        with tinsmith.Client(server.address, server.api_key) as client:
            run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=1)
            with _traced(server.pid, trace_path) as problem:
                for number in range(num_submits if not problem else 0):
                    run.forward_backward([supervised_datum(1, number)]).result()
            run_name = run.name
    finally:
        server.stop()
    if problem:
        return Findings([Row(name=name, value=None, target=0, note=problem)])
    trace = Trace(run_name)
    with trace_path.open(errors="replace") as lines:
        for line in lines:
            trace.take(line)
    return Findings(
        [
            Row(name="acknowledgements found", value=len(trace.acks), target=num_submits),
            Row(name=name, value=sum(not is_synced for is_synced in trace.acks), target=0),
        ],
        {"syncs of the ledger": trace.num_syncs},
    )


@dataclass(slots=True)
class Trace:
    """What a trace says of the operations of one run, which were submitted one after another.

    Attributes:
        run: Its name.
        acks: For each acknowledgement, whether a whole sync lay between request and answer.
        num_syncs: Syncs of the ledger.
    """

    run: str
    acks: list[bool] = field(default_factory=list)
    num_syncs: int = 0
    _ids: set[str] = field(default_factory=set)
    _syncing_since: dict[str, int] = field(default_factory=dict)
    _reading: dict[str, str] = field(default_factory=dict)
    _ends: dict[str, str] = field(default_factory=dict)
    _arrived_at: int | None = None
    _last_sync: int = -1
    _num_lines: int = 0

    def take(self, line: str) -> None:
        """Take the next line."""
        self._num_lines += 1
        found = _LINE_PATTERN.match(line)
        if found is None:
            return
        pid, call, rest = found["pid"], found["call"], found["rest"]
        if call in ("fsync", "fdatasync"):
            self._take_sync(pid, rest)
        elif call in _RECEIVES:
            self._take_read(pid, rest)
        elif call in _SENDS and self._arrived_at is not None and self._names_next(rest):
            self.acks.append(self._last_sync > self._arrived_at)
            self._arrived_at = None

    def _take_read(self, pid: str, rest: str) -> None:
        """Note the requests that have arrived; a read may end within the id of one."""
        found = _SOCKET_PATTERN.match(rest)
        socket = found["socket"] if found is not None else self._reading.pop(pid, "")
        if "<unfinished" in rest:
            self._reading[pid] = socket
            return
        text = self._ends.get(socket, "") + "".join(_STRING_PATTERN.findall(rest))
        self._ends[socket] = text[-_KEPT_CHARACTERS:]
        for request_id in re.findall(f"{re.escape(self.run)}.{{0,12}}?({_UUID})", text):
            if request_id not in self._ids:
                self._ids.add(request_id)
                self._arrived_at = self._num_lines

    def _names_next(self, sent: str) -> bool:
        """Whether what is sent names the operation that is to be acknowledged next."""
        name = f"{self.run}/operations/{len(self.acks) + 1}"
        return re.search(rf"{re.escape(name)}\D", sent) is not None

    def _take_sync(self, pid: str, rest: str) -> None:
        """Note when the last sync that has ended began."""
        if "resumed>" in rest:
            begin = self._syncing_since.pop(pid, None)
        elif _LOG_PATTERN.match(rest) is None:
            return
        elif "unfinished" in rest:
            self._syncing_since[pid] = self._num_lines
            return
        else:
            begin = self._num_lines
        if begin is not None:
            self.num_syncs += 1
            self._last_sync = begin


@contextlib.contextmanager
def _traced(pid: int, path: Path) -> Iterator[str]:
    """Trace a process within; yield why it cannot be traced, or nothing."""
    command = ["strace", "-f", "-y", "-s", str(_MAX_STRING_BYTES), "-e", f"trace={_CALLS}"]
    strace = subprocess.Popen(
        [*command, "-o", str(path), "-p", str(pid)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end_s = time.monotonic() + _ATTACH_TIMEOUT_S
    try:
        while strace.poll() is None and not _is_traced(pid):
            if time.monotonic() > end_s:
                raise TimeoutError("strace does not attach")
            time.sleep(_POLL_S)
        assert strace.stderr is not None
        yield "" if strace.poll() is None else strace.stderr.read().strip()
    finally:
        if strace.poll() is None:
            strace.send_signal(signal.SIGINT)
        strace.wait(_ATTACH_TIMEOUT_S)
        strace.stderr.close()


def _is_traced(pid: int) -> bool:
    """Whether all threads of a process have a tracer."""
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all("TracerPid:\t0\n" not in status for status in statuses)
