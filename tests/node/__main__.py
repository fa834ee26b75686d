"""Makes what the tests of a real node need, and runs them in namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.e2e.cluster import UnavailableError, prepare
from tests.e2e.cluster.debian import say
from tests.node.container_node import FOLDER, control_groups, prepare_namespaces
from tests.node.images import PODS
from tests.node.programs import Programs, find_programs

# Whatever ends this process ends the namespaces, and with them everything that runs there.
_ISOLATED = (
    *("setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "--mount", "--pid", "--ipc"),
    *("--fork", "--kill-child", "--mount-proc"),
)
_IMAGES_TIMEOUT_S = 3600
_TESTS_TIMEOUT_S = 3600


def main(arguments: list[str]) -> int:
    """Run the tests; the arguments are those of pytest. Return its exit code."""
    if (inside := os.environ.get(FOLDER)) and os.getpid() == 1:
        prepare_namespaces(Path(inside))
        # Not in this process: number 1 of a namespace is the parent of what has lost its own.
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
        return subprocess.call([sys.executable, *tests, *arguments])
    try:
        prepare()
        programs = find_programs()
    except UnavailableError as error:
        say(str(error))
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as closing:
        folder = Path(tempfile.mkdtemp(prefix="tinsmith-node-"))
        closing.callback(shutil.rmtree, folder)
        make_images(programs, folder)
        closing.callback(_remove_control_groups, folder.name)
        return subprocess.call(
            [*_ISOLATED, sys.executable, "-m", "tests.node", *arguments],
            env={**os.environ, FOLDER: str(folder)},
            timeout=_TESTS_TIMEOUT_S,
        )


def make_images(programs: Programs, folder: Path) -> None:
    """Make the images of the pods, in a mount namespace of their own."""
    base = folder / "base"
    with tarfile.open(programs.base) as archive:
        archive.extractall(base, filter="fully_trusted")
    module = ["-m", "tests.node.images", str(base), str(programs.busybox), str(folder)]
    subprocess.run(
        ["unshare", "--mount", sys.executable, *module], check=True, timeout=_IMAGES_TIMEOUT_S
    )
    for pod in PODS:
        shutil.rmtree(folder / pod)


def _remove_control_groups(name: str) -> None:
    """Remove the groups of containers that have ended; they outlive every namespace."""
    end_s = time.monotonic() + 10.0
    for top in (hierarchy / name for hierarchy in control_groups()):
        groups = [path for path in top.rglob("*") if path.is_dir()]
        for group in [*sorted(groups, reverse=True), top]:
            while True:
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:  # its last process is still ending
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
