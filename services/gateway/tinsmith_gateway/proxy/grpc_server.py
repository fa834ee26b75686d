"""The gRPC server behind the front: on a Unix socket that only this process can reach."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import grpc.aio

from tinsmith_gateway.proxy.grpc_proxy import PassThrough
from tinsmith_runtime.rpc.health import Health
from tinsmith_runtime.rpc.server import ServerConfig, server_options

# What the address of a Unix socket holds on Linux, less the zero at its end.
_MAX_SOCKET_PATH = 107


class NativeServer:
    """Serves what is passed through, and health.

    Args:
        config: Limits of messages and calls, pings, and how long running calls get at the end.
        passthrough: Answers all other methods.
        data_dir: Holds the socket if its path is short enough for one.
    """

    def __init__(self, config: ServerConfig, passthrough: PassThrough, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._drain_timeout_s = config.drain_timeout_s
        self._server = grpc.aio.server(options=server_options(config))
        self._health = Health()
        # Asked in this order: the pass-through has an answer for every method.
        self._server.add_generic_rpc_handlers((self._health, passthrough))
        self._folder: Path | None = None

    async def start(self) -> Path:
        """Serve, report healthy, and return the path of the socket."""
        self._folder = await asyncio.to_thread(_make_folder, self._data_dir)
        path = self._folder / "grpc"
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        await self._health.report(is_serving=True)
        return path

    async def stop(self) -> None:
        """Report unhealthy, let running ones finish, close."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=self._drain_timeout_s)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None


def _make_folder(data_dir: Path) -> Path:
    """Make the folder of the socket, which its owner alone can enter.

    Below the data folder, whose one user this process is: what cleans a shared folder for temporary
    files would take the socket of a gateway that runs for long.
    """
    folder = data_dir.absolute() / "native"
    if len(os.fsencode(folder / "grpc")) > _MAX_SOCKET_PATH:
        return Path(tempfile.mkdtemp(prefix="tinsmith-gateway-"))
    # What a gateway left that was killed.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder
