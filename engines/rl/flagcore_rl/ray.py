"""Starts commands that use Ray on several nodes: one program, and a process of Ray on each node."""

from collections.abc import Sequence

_CLUSTER = """\
at=$MASTER_ADDR:$MASTER_PORT
up() { ray status --address="$at" 2> /dev/null | grep -c "^ *1 node_"; }
joined() { for _ in $(seq 60); do [ "$(up)" -ge "$1" ] && break; sleep 5; done; }
if [ "$NODE_RANK" = 0 ]; then place="--head --port=$MASTER_PORT"; else place=--address=$at; joined 1; fi
ray start $place --block & trap "kill $!; wait $!" EXIT
joined "$1"; shift
if [ "$NODE_RANK" = 0 ]; then RAY_ADDRESS=$at "$@"; exit; fi
while [ "$(up)" -gt 0 ]; do sleep 10; done
"""
"""Each node starts Ray in the foreground of the script, which stops only what it started. The first node waits up to 5
minutes for the others, runs the command, and ends with its exit code; the others end when the first one is gone. Tried
with Ray 2.60."""
_FIRST = '[ "$NODE_RANK" != 0 ] || exec "$@"'
"""A job that is submitted starts nothing of its cluster."""


def on_all_nodes(words: Sequence[str], nodes: int) -> tuple[str, ...]:
    """Return the command that each of several nodes runs, with NODE_RANK, MASTER_ADDR and MASTER_PORT set."""
    if tuple(words[:3]) == ("ray", "job", "submit"):
        return ("bash", "-c", _FIRST, "ray", *words)
    return ("bash", "-c", _CLUSTER, "ray", str(nodes), *words)
