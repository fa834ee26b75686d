"""The embedded server as a child process whose failpoints a test sets and watches."""

from __future__ import annotations

from pathlib import Path

from tinsmith_local.process import ServerProcess


class WatchedServer(ServerProcess):
    """A server that keeps the name of the last failpoint it passed.

    Args:
        folder: Data, state and logs go below it.
        model: Directory of the base model, served as `tiny`.
        failpoints: Value of TINSMITH_FAILPOINTS.
    """

    def __init__(self, folder: Path, model: Path, *, failpoints: str = "") -> None:
        self._trace = folder / "failpoint"
        super().__init__(
            folder,
            {"tiny": model},
            environment={
                "TINSMITH_FAILPOINTS": failpoints,
                "TINSMITH_FAILPOINT_TRACE": str(self._trace),
            },
        )

    @property
    def phase(self) -> str:
        """The last failpoint that the server passed."""
        return self._trace.read_text().strip() if self._trace.is_file() else ""
