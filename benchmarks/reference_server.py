"""A server with a fixed schedule, to which load clients are compared. It streams the answers of OpenAI's APIs for
completions and chats, and logs the time of every write.

    python benchmarks/reference_server.py --prompt-ms 0.2 --chunk-ms 10

An answer has its first token `--start-ms` + `--prompt-ms` x prompt tokens after a slot is free. A chunk of
`--tokens-per-chunk` tokens follows every `--chunk-ms`, and the last one has the finish reason. The schedule of an
answer does not drift: a late write does not delay the ones after it. `GET /log` returns the requests that ended since
the last call. Tokens of a text are counted by `--tokenizer` (a file), which needs the package `tokenizers`. The server
runs on the last core if the machine has several. The first line of the output is the port.
"""

import argparse
import asyncio
import heapq
import json
import os
import re
import selectors
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

Event = dict[str, Any]
HEAD = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
END = b"0\r\n\r\n"


def main() -> None:
    """Print the port, and serve until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start-ms", type=float, default=0.0)
    parser.add_argument("--prompt-ms", type=float, default=0.0)
    parser.add_argument("--chunk-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--slots", type=int, help="answers at once; the others wait (default: no limit)")
    parser.add_argument("--empty-first", action="store_true", help="begin each answer at once with an empty event")
    parser.add_argument("--tokenizer")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    # Timers of epoll have a resolution of 1 ms, those of select 1 us.
    asyncio.SelectorEventLoop(selectors.SelectSelector()).run_until_complete(Server(options).run())


class Server:
    """The schedule, the free slots and the log."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log: list[dict[str, Any]] = []
        self._free_s = [0.0] * (options.slots or 0)
        """When each slot is free, as a heap; all lengths are known, so a slot is assigned on arrival."""

    async def run(self) -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    def tokens(self, body: Event) -> int:
        """Return the number of prompt tokens. A text has one token per word without a tokenizer."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        texts = prompt if isinstance(prompt, list) else [prompt] if isinstance(prompt, str) else _texts(body)
        return sum(map(self._count, texts))

    @cached_property
    def _count(self) -> Callable[[str], int]:
        if not self.options.tokenizer:
            return lambda text: len(text.split())
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(self.options.tokenizer)
        return lambda text: len(tokenizer.encode(text).ids)

    def first_s(self, now: float, prompt_tokens: int, chunks: int) -> float:
        """Return when the first of `chunks` chunks is due, and occupy a slot until the last one."""
        start = max(now, heapq.heappop(self._free_s)) if self._free_s else now
        first = start + (self.options.start_ms + self.options.prompt_ms * prompt_tokens) / 1e3
        if self.options.slots:
            heapq.heappush(self._free_s, first + (chunks - 1) * self.options.chunk_ms / 1e3)
        return first


class _Connection(asyncio.Protocol):
    """One connection, which may send several requests, one after another."""

    def __init__(self, server: Server) -> None:
        self._server, self._received = server, b""
        self._timer: asyncio.Handle | None = None
        self._resumed: Callable[[], None] | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._resumed:
            self._timer, self._resumed = self._loop.call_soon(self._resumed), None

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not separator or (length and len(body) < int(length[1])):
            return
        self._received = b""
        method, path, _ = head.split(b" ", 2)
        if method == b"POST" and path.endswith(b"/completions"):
            self._answer(json.loads(body), now, chat=b"/chat/" in path)
        elif path == b"/log":
            self._json(b"200 OK", self._server.log)
            self._server.log = []
        elif path in (b"/v1/models", b"/health"):
            self._json(b"200 OK", {"object": "list", "data": [{"id": "reference", "object": "model"}]})
        else:
            self._json(b"404 Not Found", {"error": {"message": "the reference server only completes prompts"}})

    def _json(self, status: bytes, data: Any) -> None:
        self._transport.write(HEAD % (status, b"application/json") + _chunk(json.dumps(data).encode()) + END)

    def _answer(self, body: Event, now: float, *, chat: bool) -> None:
        options = self._server.options
        tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        prompt_tokens = self._server.tokens(body)
        chunks = 1 + -(-(tokens - 1) // options.tokens_per_chunk)
        first = self._server.first_s(now, prompt_tokens, chunks)
        interval = options.chunk_ms / 1e3
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        row = {"received_s": now, "input_tokens": prompt_tokens, "output_tokens": tokens, "sent_s": []}
        sent: list[float] = row["sent_s"]
        event = _event(chat, " a" * options.tokens_per_chunk)
        self._transport.write(HEAD % (b"200 OK", b"text/event-stream"))
        if options.empty_first:
            self._transport.write(_event(chat, "", role=True))

        def step() -> None:
            is_last = len(sent) + 1 == chunks
            sent.append(time.perf_counter())
            if not is_last:
                self._transport.write(event if sent[1:] else _event(chat, " a"))
                if self._paused and not interval:
                    self._resumed = step
                else:
                    self._timer = self._loop.call_at(due + len(sent) * interval, step)
                return
            end = _event(chat, " a", finish="length") + _event(chat, None, usage=usage) + _chunk(b"data: [DONE]\n\n")
            self._transport.write(end + END)
            self._server.log.append(row)

        due = self._loop.time() + first - now
        self._timer = self._loop.call_at(due, step)


def _texts(body: Event) -> list[str]:
    contents = [message["content"] for message in body["messages"]]
    parts = [[{"text": each}] if isinstance(each, str) else each for each in contents]
    return [part["text"] for message in parts for part in message if "text" in part]


def _event(
    chat: bool, text: str | None, *, finish: str | None = None, usage: Event | None = None, role: bool = False
) -> bytes:
    """Return an event as an HTTP chunk; without a `text` it has no choice."""
    choice: Event = {"index": 0, "logprobs": None, "finish_reason": finish}
    if chat:
        choice["delta"] = {"role": "assistant", "content": text} if role else {"content": text}
    else:
        choice["text"] = text
    event = {
        "id": "cmpl-7c9a3b1e5f2d4a60b8c1",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1763650000,
        "model": "reference",
        "choices": [] if text is None else [choice],
        "usage": usage,
    }
    return _chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    main()
