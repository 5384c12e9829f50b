"""A hub: a separate process on flagcore's machine that holds the connections to all hosts.

It keeps Ray's client library, or the port to which pods connect, out of flagcore's own process. The hub answers
requests, which are lines of JSON on its standard input, and ends when the input closes. Channels use a socket in a
private folder.
"""

import atexit
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flagcore.errors import NoDevice
from flagcore_hosts import wire

Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
Connect = Callable[[str, Any, Any], Awaitable[None]]


class Hub:
    """A process of `module` that connects flagcore to the agents on hosts. It starts with the first request."""

    def __init__(self, launcher: str, module: str) -> None:
        self.launcher, self.module = launcher, module
        self.folder = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        """The path of the socket to which channels connect."""
        return os.path.join(self.folder, "socket")

    def channel(self, host: str) -> list[str]:
        """Return the command that connects to an agent on `host`."""
        return [sys.executable, "-I", "-S", wire.__file__, self.socket, host]

    def ask(self, seconds: float, /, **request: object) -> Mapping[str, Any]:
        """Return the answer to a request. Raises NoDevice if the hub reports a problem, or after `seconds`."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process
        assert self.process.stdin
        assert self.process.stdout
        answer: dict[str, Any] = {"problem": f"no answer within {seconds:.0f} s"}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        if select.select([self.process.stdout], [], [], seconds)[0]:
            answer = json.loads(self.process.stdout.readline() or b'{"problem": "its process died"}')
        if "problem" in answer:
            self.close()
            raise NoDevice(f"auto_tuner.launcher = {self.launcher}: {answer['problem']}")
        return answer

    def _start(self) -> None:
        self.close()
        self.folder = tempfile.mkdtemp(prefix="flagcore-hub-")
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, self.socket],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.close)

    def close(self) -> None:
        """End the hub and all its channels."""
        atexit.unregister(self.close)
        if self.process is not None:
            for stream in (self.process.stdin, self.process.stdout):
                assert stream
                with contextlib.suppress(OSError):
                    stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.process = None


async def serve(path: str, answer: Answer, connect: Connect) -> None:
    """Run a hub until flagcore closes the standard input. It answers requests, and connects channels to hosts."""
    import asyncio  # flagcore's own process, which only asks the hub, does not need it

    tasks = set[asyncio.Task[None]]()
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Ray prints messages of its nodes to stdout

    async def reply(line: bytes) -> None:
        os.write(answers, json.dumps(await answer(json.loads(line))).encode() + b"\n")

    async def channel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = os.fsdecode((await reader.readline()).rstrip(b"\n"))
        try:
            await connect(host, reader, writer)
        except Exception as error:
            writer.write(wire.REASON + str(error).encode() + b"\n")
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    await asyncio.start_unix_server(channel, wire.short(path))
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    while line := await requests.readline():
        tasks.add(asyncio.create_task(reply(line)))
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os._exit(0)


async def run_both(first: Awaitable[None], second: Awaitable[None]) -> None:
    """Run both directions of a channel until one of them ends, and raise its exception if it failed."""
    import asyncio

    tasks = {asyncio.ensure_future(first), asyncio.ensure_future(second)}
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    for task in done:
        task.result()
