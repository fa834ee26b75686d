"""`python -m tinsmith_runtime.rpc.health_probe [HOST:PORT]`: exits 0 if a pod serves.

Kubernetes asks by itself from 1.24 on; this is for clusters that are older.
"""

from __future__ import annotations

import argparse
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, *, timeout_s: float) -> bool:
    """Return whether a gRPC server answers its health check with SERVING in time."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
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
    arguments = parser.parse_args()
    if not arguments.address:
        parser.error("name an address, or set TINSMITH_LISTEN_ADDRESS")
    return 0 if is_serving(arguments.address, timeout_s=arguments.timeout_s) else 1


if __name__ == "__main__":
    sys.exit(main())
