"""Faults on purpose: processes that are killed, stopped and cut off while they train."""

import os

# Servers are started while clients of this process call: gRPC's handlers of fork, which are of no
# use to a child that becomes another program, now and then crash it before it does.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
