"""The hub of the ray launcher. It reserves whole nodes of a Ray cluster in a placement group, with one actor per node.

Ray removes the group and the actors when this process ends, even if it is killed. An actor relays the channels of
agents, and ends with its node, its group or this process; then the agents end their trials.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from flagcore_hosts.connection import agent_command
from flagcore_hosts.hub import run_both, serve
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WAIT_SECONDS = 60.0
"""Maximum time in seconds to wait for free nodes."""
CONNECT_SECONDS = 5.0
PIECE_BYTES = 1 << 16
MAX_CALLS = 64
"""Maximum number of concurrent calls of an actor. For each agent, one call waits for its output."""


class Agents:
    """An actor that runs agents on a node. It is pickled and must not import flagcore, which nodes may not have.

    Ray kills the children of an actor that ends. An agent has to end its trial first, so a shell that exits starts the
    agent.
    """

    START = 'exec 3<&0; sh -c "$1" <&3 3<&- & exit 0'

    def __init__(self) -> None:
        self.shells: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, command: str) -> None:
        """Start an agent."""
        environment = {
            name: os.environ[name] for name in os.environ if not name.startswith(("RAY_", "OMP_NUM_THREADS"))
        }
        words = ["sh", "-c", self.START, "sh", command]
        pipe = subprocess.PIPE
        shell = subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self.shells[number] = shell
        shell.wait()

    def write(self, number: int, data: bytes) -> None:
        """Write to an agent."""
        stream = self.shells[number].stdin
        assert stream
        stream.write(data)
        stream.flush()

    def read(self, number: int, size: int) -> bytes:
        """Wait for output of an agent and return it. The result is empty when the agent has ended."""
        stream = self.shells[number].stdout
        assert stream
        return os.read(stream.fileno(), size)

    def end(self, number: int) -> None:
        """Close the channel of an agent, which then ends its trial."""
        stream = self.shells.pop(number).stdin
        assert stream
        stream.close()


class Cluster:
    """The nodes of a Ray cluster that are reserved for this process."""

    def __init__(self) -> None:
        self.group: PlacementGroup | None = None
        self.bundles: list[dict[str, float]] = []
        self.places: dict[str, int] = {}
        """The bundle of each host, by its address. A bundle that Ray moved has several addresses."""
        self.actors: dict[int, Any] = {}
        self.channels: Counter[int] = Counter()
        """The actor of each bundle, and the number of its agents."""
        self.numbers = itertools.count()

    async def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Reserve hosts by name or number, and return their addresses. Or return the hosts that were replaced."""
        try:
            if request.get("replaced"):
                return {"replaced": await asyncio.to_thread(self.replaced)}
            if not ray.is_initialized():
                _require_answer(os.environ.get("RAY_ADDRESS", ""))
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
            return {"hosts": await asyncio.to_thread(self.hold, request["nodes"], request["names"])}
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return {"problem": (lines or [type(error).__name__])[0]}

    def hold(self, count: int, names: Sequence[str]) -> list[str]:
        """Reserve whole nodes, so that no other task runs on them. Raises ValueError if there are too few."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.actors, self.channels = {}, Counter()
        nodes = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
        self.bundles = _bundles_by_name(nodes, names) if names else _bundles_by_count(nodes, count)
        self.group = placement_group(self.bundles, strategy="STRICT_SPREAD")
        if not self.group.wait(WAIT_SECONDS):
            remove_placement_group(self.group)
            self.group = None
            raise ValueError(f"{count} whole hosts of the Ray cluster are not free: other jobs use them")
        self.places = {address: bundle for bundle, address in self._addresses().items()}
        return list(names) or sorted(self.places)

    def _addresses(self) -> dict[int, str]:
        """Return the address of the current node of each bundle; after a loss Ray moves a bundle to another node."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        placed = placement_group_table(self.group)["bundles_to_node_id"]
        return {bundle: addresses.get(node, "") for bundle, node in placed.items()}

    def replaced(self) -> dict[str, str]:
        """Return the current address of each host that was lost and that Ray replaced by another node."""
        current = {bundle: address for bundle, address in self._addresses().items() if address}
        self.places |= {address: bundle for bundle, address in current.items()}
        return {host: current[bundle] for host, bundle in self.places.items() if current.get(bundle, host) != host}

    async def connect(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start an agent on a host and relay its channel."""
        bundle = self.places[host]
        if self._addresses().get(bundle) != host:
            raise ValueError("its Ray node is lost")
        actors, channels, number = self.actors, self.channels, next(self.numbers)
        actor = actors[bundle] = actors.get(bundle) or self._start_actor(bundle)
        channels[bundle] += 1

        async def down() -> None:
            while data := await reader.read(PIECE_BYTES):
                await actor.write.remote(number, data)

        async def up() -> None:
            while data := await actor.read.remote(number, PIECE_BYTES):
                writer.write(data)
                await writer.drain()

        try:
            await actor.start.remote(number, agent_command())
            await run_both(down(), up())
        finally:
            channels[bundle] -= 1
            if channels[bundle]:
                actor.end.remote(number)
            else:
                ray.kill(actors.pop(bundle))

    def _start_actor(self, bundle: int) -> Any:
        """Return an actor with all resources of a bundle, which the agents of its node share."""
        resources = {name: size for name, size in self.bundles[bundle].items() if not name.startswith("node:")}
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        cpus, gpus = resources.pop("CPU", 0.0), resources.pop("GPU", 0.0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "scheduling_strategy": strategy}
        return ray.remote(Agents).options(max_concurrency=MAX_CALLS, max_restarts=0, **options).remote()


def _require_answer(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT; Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise OSError(f"no Ray cluster at RAY_ADDRESS = {address}: {error.strerror or error}") from None


def _whole_node(node: Mapping[str, Any]) -> dict[str, float]:
    """Return the processors and devices of a node: all its Ray resources except memory and the names of the node."""
    return {
        name: size
        for name, size in node["Resources"].items()
        if not name.startswith(("node:", "accelerator_type:")) and name not in ("memory", "object_store_memory")
    }


def _bundles_by_name(nodes: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, float]]:
    if missing := [name for name in names if name not in nodes]:
        raise ValueError(f"{', '.join(missing)}: not in the Ray cluster, which has {', '.join(sorted(nodes))}")
    return [{**_whole_node(nodes[name]), f"node:{name}": 0.001} for name in names]


def _bundles_by_count(nodes: Mapping[str, Mapping[str, Any]], count: int) -> list[dict[str, float]]:
    """Return bundles for `count` nodes of the most common kind that has processors."""
    kinds = Counter(tuple(sorted(_whole_node(node).items())) for node in nodes.values() if _whole_node(node).get("CPU"))
    kind, found = next(iter(kinds.most_common(1)), ((), 0))
    if found < count:
        raise ValueError(f"the Ray cluster has {found} equal hosts, but cluster.nodes = {count}")
    return [dict(kind)] * count


if __name__ == "__main__":
    cluster = Cluster()
    asyncio.run(serve(sys.argv[1], cluster.answer, cluster.connect))
