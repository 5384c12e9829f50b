"""The hub of the kubernetes launcher. It accepts connections from the pods of a job, one connection for each trial."""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

from flagcore_hosts.hub import run_both, serve

from flagcore_kubernetes.join import CONNECT_SECONDS, keep_alive, proof, token

JOIN_SECONDS = 50.0
"""Maximum time in seconds until a pod joins again for the next trial."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pods:
    """The connections of the pods that have joined and have no trial yet, by the name of the pod."""

    def __init__(self) -> None:
        self.free: dict[str, Stream] = {}
        self.joined = asyncio.Condition()
        self.key = b""

    async def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Listen on a port, and wait until all named pods have joined."""
        names = set(request["names"])
        try:
            if not self.key:
                self.key = token()
                await asyncio.start_server(self._accept, None, request["port"])
            async with self.joined:
                await asyncio.wait_for(self.joined.wait_for(lambda: names <= self.free.keys()), request["seconds"])
        except (TimeoutError, asyncio.TimeoutError):
            missing_pods = ", ".join(sorted(names - self.free.keys()))
            return {"problem": f"{missing_pods}: did not connect within {request['seconds']:.0f} s"}
        except (OSError, ValueError) as error:
            return {"problem": str(error)}
        return {}

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a pod that proves that it has the secret. Close all other connections."""
        try:
            name = await asyncio.wait_for(self._check(reader, writer), CONNECT_SECONDS)
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
            writer.close()
            return
        if old := self.free.pop(name, None):
            old[1].close()
        self.free[name] = reader, writer
        async with self.joined:
            self.joined.notify_all()

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        connection: socket.socket = writer.get_extra_info("socket")
        keep_alive(connection)
        own_nonce = secrets.token_hex(16)
        writer.write(own_nonce.encode() + b"\n")
        answer = json.loads(await reader.readline())
        name, their_nonce = str(answer["host"]), str(answer["nonce"])
        if not hmac.compare_digest(str(answer["proof"]), proof(self.key, "host", own_nonce, their_nonce, name)):
            raise ValueError(name)
        writer.write(proof(self.key, "controller", their_nonce, own_nonce, name).encode() + b"\n")
        return name

    async def connect(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a channel to the agent of a pod. The agent starts with the first bytes."""
        pod = await asyncio.wait_for(self._take_pod(name), JOIN_SECONDS)
        try:
            await run_both(_copy(reader, pod[1]), _copy(pod[0], writer))
        finally:
            pod[1].close()

    async def _take_pod(self, name: str) -> Stream:
        async with self.joined:
            while True:
                await self.joined.wait_for(lambda: name in self.free)
                pod = self.free.pop(name)
                if not pod[0].at_eof():
                    return pod


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


async def main(path: str) -> None:
    """Run the hub at the socket `path`."""
    pods = Pods()
    await serve(path, pods.answer, pods.connect)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
