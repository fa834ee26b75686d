"""`python -m tinsmith_runtime.rpc.health_probe [HOST:PORT]`: exits 0 if a pod serves.

Kubernetes asks by itself from 1.24 on. This is for clusters that are older, and for pods that ask
callers for a certificate, which Kubernetes does not have: the probe shows that of the pod itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinsmith.rpc.channels import CHANNEL_OPTIONS
from tinsmith_runtime.rpc.pod_tls import PodTls

_FILES = ("TINSMITH_POD_CERTIFICATE", "TINSMITH_POD_CERTIFICATE_KEY", "TINSMITH_POD_AUTHORITY")


def is_serving(
    address: str, *, timeout_s: float, tls: PodTls | None = None, role: str = ""
) -> bool:
    """Return whether a gRPC server answers its health check with SERVING in time.

    Args:
        address: `host:port`.
        timeout_s: How long to wait for the answer.
        tls: What the server is shown; None asks in clear.
        role: What the server has to be.
    """
    channel = (
        grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        if tls is None
        else tls.open_blocking_channel(address, role)
    )
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=timeout_s
        )
    except grpc.RpcError:
        return False
    finally:
        channel.close()
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    """Return the exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m tinsmith_runtime.rpc.health_probe",
        description="Exit 0 if a pod serves, else 1.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        default=os.environ.get("TINSMITH_LISTEN_ADDRESS"),
        help="host:port; where the pod of this container listens by default",
    )
    parser.add_argument("--timeout-s", type=float, default=3.0)
    parser.add_argument("--role", default="", help="what the pod is, where it shows a certificate")
    arguments = parser.parse_args()
    if not arguments.address:
        parser.error("name an address, or set TINSMITH_LISTEN_ADDRESS")
    files = (os.environ.get(name) for name in _FILES)
    tls = PodTls.from_settings(*(Path(file) if file else None for file in files))
    found = is_serving(
        arguments.address, timeout_s=arguments.timeout_s, tls=tls, role=arguments.role
    )
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
