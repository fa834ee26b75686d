"""Jobs on a real node: kubelet, containerd and images made by the lines of the Dockerfile.

The tests of `tests/e2e` run pods as processes, fast and many. These run few, as a cluster does: in
control groups, as users, on read-only root file systems, with filtered system calls and addresses
of their own.

    python -m tests.node

makes the images of all pods (minutes: each is installed anew), and runs the tests in namespaces of
their own, so that nothing stays on the machine: no bridge, no mount, no process. It takes root,
Debian and control groups of version 1, and no container engine.
"""
