"""Measures how many streamed tokens per second the load client processes on one core.

The server is a separate process on raw sockets. Like an engine, it sends one token to every connection in each step, as
a separate event and chunk. With a rate, a step follows the last one after connections / rate seconds, so the client
reads every event separately, which is the most work. Without a rate, it follows immediately, and waiting events are
read together. The client is pinned to one core if the machine has at least two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from statistics import median

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.result import Target
from flagcore.engines.serving.load.sending import measure

GOAL = 20_000
EVENT = {
    "id": "cmpl-7c9a3b1e5f2d4a60b8c1",
    "object": "text_completion",
    "created": 1763650000,
    "model": "null",
    "choices": [
        {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": None}
    ],
    "usage": None,
}


def main() -> None:
    """Print one line per repeat, and finally one JSON object with the results and the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="run the server and print its port")
    parser.add_argument("--rate", type=float, default=GOAL, help="rate of the server in tokens per second")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.rate))
        return
    figures = {
        "paced": bench(options, options.rate),
        "unpaced": bench(options, math.inf),
        "goal_tokens_per_s": GOAL,
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
    }
    print(json.dumps(figures))


def bench(options: argparse.Namespace, rate: float) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--rate", str(rate)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        target = Target(f"http://127.0.0.1:{int(server.stdout.readline())}")
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:1])
            os.sched_setaffinity(server.pid, cores[1:])
        load = Load(
            input_len=32, output_len=options.tokens, num_prompts=options.requests, concurrency=options.concurrency
        )
        by_wall, by_cpu = [], []
        for seed in range(options.repeats):
            tokens = measure([target], load, model="null", vocab_size=32000, seed=seed, timeout_s=300)
            if tokens.problems:
                raise SystemExit("; ".join(tokens.problems))
            figures = tokens.figures
            by_wall.append(figures["output_tokens_per_s"])
            by_cpu.append(options.requests * options.tokens / figures["client_cpu_s"])
            print(
                f"{by_wall[-1]:,.0f} tokens/s; {by_cpu[-1]:,.0f} per CPU second of the client, which used "
                f"{figures['client_cpu_share']:.2f} cores; other processes used {figures['others_cores']:.2f}",
                file=sys.stderr,
            )
    finally:
        server.terminate()
        server.wait()
        os.sched_setaffinity(0, cores)
    return {
        "tokens_per_s": median(by_wall),
        "tokens_per_client_cpu_s": median(by_cpu),
        "ratio_to_goal": median(by_cpu) / GOAL,
    }


async def serve(rate: float) -> None:
    """Answer every request with one event per token, `rate` events per second over all connections."""
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    due = time.perf_counter()
    while server.is_serving():
        busy = [answer for answer in ANSWERING if not answer.paused]
        for answer in busy:
            answer.step()
        due = max(due + len(busy) / rate, time.perf_counter() - 0.05)
        await asyncio.sleep(max(0.0, due - time.perf_counter()) if busy else 0.001)


def chunk(payload: bytes) -> bytes:
    event = b"data: " + payload + b"\n\n"
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


ANSWERING: set[_Answering] = set()
PIECE = chunk(json.dumps(EVENT, separators=(",", ":")).encode())


class _Answering(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received, self.left, self.paused = transport, b"", 0, False

    def connection_lost(self, error: Exception | None) -> None:
        ANSWERING.discard(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, _, body = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if length is None or len(body) < int(length[1]):
            return
        self.body = json.loads(body)
        self.received, self.left = b"", self.body["max_tokens"]
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        ANSWERING.add(self)

    def step(self) -> None:
        self.transport.write(PIECE)
        self.left -= 1
        if self.left:
            return
        ANSWERING.discard(self)
        tokens, read = self.body["max_tokens"], len(self.body["prompt"])
        end = {**EVENT, "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        usage = {**EVENT, "choices": [], "usage": {"prompt_tokens": read, "completion_tokens": tokens}}
        last = b"".join(chunk(json.dumps(event).encode()) for event in (end, usage))
        self.transport.write(last + chunk(b"[DONE]") + b"0\r\n\r\n")

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
