#!/bin/sh
# torchrun with --max-restarts starts the processes of one node again, and those of the other node go on with the old start.
#
# Topic: Launchers
# Package: torch 2.13.0
# Expected: All processes of the job start again after a failure, as the documentation of torchrun says.
# Seen: With `--node-rank` and `--master-addr`, the static rendezvous never reports a node that waits. The other torchrun
#   learns of the failure only when its own processes fail, which with a hung collective takes minutes. The two count
#   starts apart. With `--rdzv-backend c10d`, all processes start again, but ranks do not follow the order of nodes.
# Hurts: Who adds `--max-restarts` to a job of several nodes that fixes its ranks, as most start scripts do.
# Date: 2026-11-29
# Output:
#     torch 2.13.0
#     static: node 0 starts 2 times, node 1 starts 1 times
#     c10d: node 0 starts 2 times, node 1 starts 2 times
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def train(log: str) -> None:
    """Note the start of this process. The first one of node 0 fails, all others run for half a minute."""
    with open(log, "a") as file:
        file.write("start\n")
    if log.endswith("0") and Path(log).read_text().count("start") == 1:
        time.sleep(10)
        sys.exit(1)
    time.sleep(30)


def look() -> None:
    """Print how often the process of each of two nodes starts."""
    import torch

    folder = Path(__file__).parent
    print(f"torch {torch.__version__.split('+')[0]}")
    seen = {}
    for backend in ("static", "c10d"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        jobs, logs = [], [folder / f"{backend}-{node}" for node in (0, 1)]
        for node, log in enumerate(logs):
            fixed = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            joins = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
            options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
            argv = [sys.executable, "-m", "torch.distributed.run", *options, *(fixed if backend == "static" else joins)]
            jobs.append(subprocess.Popen([*argv, __file__, str(log)], stderr=subprocess.DEVNULL))
        for job in jobs:
            job.wait()
        seen[backend] = [log.read_text().count("start") for log in logs]
        print(f"{backend}: node 0 starts {seen[backend][0]} times, node 1 starts {seen[backend][1]} times")
    assert seen == {"static": [2, 1], "c10d": [2, 2]}


if __name__ == "__main__":
    train(sys.argv[1]) if "RANK" in os.environ else look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
