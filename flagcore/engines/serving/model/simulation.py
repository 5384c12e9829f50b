"""The scheduler of an engine, iteration by iteration: continuous batching, chunked prefill together with decoding.

Between two events (an arrival, an end, a full cache) nothing changes but the context, so such a stretch of decoding is
one step: a simulation costs by its requests, not by its tokens. Deterministic. Source: the schedulers of vLLM (Kwon et
al. 2023, arXiv 2309.06180; v1 `core/sched/scheduler.py`) and SGLang (`managers/scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf

from flagcore.engines.serving.model.price import Price

JOINT_ROWS = 128
"""Most requests with one arrival time that are parsed together: all are ready when the last one is. From the first
tokens of bursts of 64 and 128; larger bursts are split."""

MANY_PIECES = 4
"""Iterations that one prompt fills, from which on they are one step."""


@dataclass(slots=True)
class Request:
    """One request: lengths in tokens, and what happened to it, in seconds. The rest is the simulation's own."""

    arrival: float
    prompt: int
    output: int
    first: float = -1.0
    end: float = -1.0
    done: float = 0.0
    made: int = 0
    since: int = 0
    context: int = 0
    ticket: int = 0


@dataclass(slots=True)
class Outcome:
    """Requests in order, and the gaps between pieces of answers in seconds, with how often each occurred."""

    requests: list[Request]
    gaps: list[tuple[float, int]] = field(default_factory=list)
    preemptions: int = 0
    duration: float = 0.0


def simulate(
    price: Price, lengths: Sequence[tuple[int, int]], arrivals: Sequence[float] | None, concurrency: int
) -> Outcome:
    """Serve requests of `lengths` (prompt, output) and return what happened.

    With `arrivals` they are sent at these times; without, `concurrency` of them at once, and each of the others when
    one ends.
    """
    return _Simulation(price, lengths, arrivals, concurrency).run()


class _Simulation:
    """`used` counts cached tokens; `offset` + running x `step` is the context of all running sequences, and `finish` -
    running x `step` the tokens that they still will write, `promised` those of prompts in work.
    """

    def __init__(
        self, price: Price, lengths: Sequence[tuple[int, int]], arrivals: Sequence[float] | None, concurrency: int
    ) -> None:
        self.price, self.lane, self.over, self.open = price, price.lane, price.over, arrivals is not None
        times = arrivals if arrivals is not None else [0.0] * min(concurrency, len(lengths))
        self.requests = [
            Request(times[place] if place < len(times) else inf, int(prompt), max(int(output), 1))
            for place, (prompt, output) in enumerate(lengths)
        ]
        self.doors: list[float] = []
        self.through = [0] * len(self.requests)
        self.queue: deque[Request] = deque()
        self.partial: deque[Request] = deque()
        self.heap: list[tuple[int, int, Request]] = []
        self.order: list[Request] = []
        self.now = self.stalled = self.used = 0.0
        self.came, self.together = -1.0, 0
        self.step = self.running = self.offset = self.finish = self.promised = self.tickets = self.next = 0
        self.sent = len(times)
        self.out = Outcome(self.requests)
        for place in range(self.sent):
            self._enter(place)

    def run(self) -> Outcome:
        while True:
            self._look()
            if not (self.queue or self.partial or self.running):
                if self.next >= self.sent:
                    break
                self.now = self._ready()
            elif not self._prompts():
                self._decode()
        self.out.duration = self.now
        return self.out

    def _enter(self, place: int) -> None:
        """A request passes the front end, which shares its time among those that came at one moment."""
        arrival = self.requests[place].arrival
        if not self.doors or arrival != self.came or self.together >= JOINT_ROWS:
            self.doors.append(max(self.doors[-1] if self.doors else 0.0, arrival))
            self.came, self.together = arrival, 0
        self.doors[-1] += self.over.entry
        self.together += 1
        self.through[place] = len(self.doors) - 1

    def _ready(self) -> float:
        return self.doors[self.through[self.next]] + self.over.request

    def _look(self) -> None:
        """Receive new requests; a busy engine polls every `receive` iterations."""
        if self.running and self.step % self.over.receive:
            return
        while self.next < self.sent and self._ready() <= self.now:
            self.queue.append(self.requests[self.next])
            self.next += 1

    def _room(self, request: Request) -> float:
        """Return the tokens of cache that a request holds, the unused part of its last block included."""
        return request.prompt + request.made - self.lane.shared_prefix + 0.5 * (self.lane.block - 1.0)

    def _admit(self, ended: int) -> bool:
        """Take the first of the queue, if there is a place and room in the cache, or nothing else to do."""
        if not self.queue or self.running + len(self.partial) + ended >= self.lane.running:
            return False
        request = self.queue[0]
        room = self._room(request)
        ahead = request.output - request.made + self.promised + self.finish - self.running * self.step
        wanted = room + self.over.reserve * ahead
        if self.used + wanted > self.lane.cache_tokens and (self.running or ended):
            return False
        self.queue.popleft()
        self.partial.append(request)
        self.promised += request.output - request.made
        self.used += room
        request.done = min(self.lane.shared_prefix, request.prompt - 1.0)
        return True

    def _prompts(self) -> bool:
        """Compute an iteration with pieces of prompts, if there are any to compute."""
        decoding = self.running if self.over.mixes else 0
        left = self.lane.budget - decoding
        if self.partial and self._pieces(self.partial[0], decoding, left):
            return True
        tokens = pairs = longest = 0.0
        ended: list[Request] = []
        while left > 0 and (self.partial or self._admit(len(ended))):
            request = self.partial[0]
            whole = request.prompt + request.made
            piece = min(left, whole - request.done)
            pairs += piece * (request.done + 0.5 * piece)
            request.done += piece
            tokens, left, longest = tokens + piece, left - piece, max(longest, piece)
            if request.done >= whole:
                ended.append(self.partial.popleft())
        if not tokens:
            return False
        time = self.price.mixed(decoding, tokens, longest, pairs, len(ended))
        if decoding:
            time += self.price.cached(self.running) * (self.offset + self.running * self.step)
            self._advance(1, time)
        else:
            self.now += time
            self.stalled += time if self.running else 0.0
        for request in ended:
            self._start(request)
        self._finish()
        return True

    def _pieces(self, request: Request, decoding: int, left: float) -> bool:
        """Compute those iterations in one step of which a long prompt takes all the room, unless there are hardly any.

        The last piece is not among them, and no sequence ends before the last of them.
        """
        if left <= 0.0 or request.prompt + request.made - request.done <= MANY_PIECES * left:
            return False
        count = ceil((request.prompt + request.made - request.done) / left) - 1
        if decoding:
            count = min(count, self.heap[0][0] - self.step)
        time = self.price.pieces(decoding, left, left * (request.done + 0.5 * left), count)
        request.done += count * left
        if decoding:
            read = self.price.cached(self.running)
            context = self.offset + self.running * self.step
            self._advance(count, time + read * count * (context + self.running * (count - 1) / 2.0))
            self._finish()
        else:
            self.now += time
            self.stalled += time if self.running else 0.0
        return True

    def _start(self, request: Request) -> None:
        """A prompt is computed: the first token is there, or after a preemption the next."""
        if request.first < 0:
            request.first = self.now
        self.promised -= request.output - request.made
        request.made += 1
        self.used += 1
        if request.made >= request.output:
            self.used -= self._room(request)
            self._end(request)
            return
        self.tickets += 1
        self.running += 1
        request.context, request.since, request.ticket = request.prompt + request.made, self.step, self.tickets
        self.offset += request.context - self.step
        self.finish += self.step + request.output - request.made
        self.order.append(request)
        heappush(self.heap, (self.step + request.output - request.made, self.tickets, request))

    def _advance(self, steps: int, time: float) -> None:
        """All running sequences have `steps` more tokens, `time` later; the first waited for prompts, too."""
        gap = time / steps
        self.out.gaps.append((gap + self.stalled, self.running))
        if steps > 1:
            self.out.gaps.append((gap, self.running * (steps - 1)))
        self.stalled = 0.0
        self.now += time
        self.step += steps
        self.used += self.running * steps

    def _stop(self, request: Request) -> None:
        self.running -= 1
        self.offset -= request.context - request.since
        self.finish -= request.since + request.output - request.made
        request.made += self.step - request.since
        request.ticket = 0
        self.used -= self._room(request)

    def _finish(self) -> None:
        while self.heap and (self.heap[0][0] <= self.step or self.heap[0][2].ticket != self.heap[0][1]):
            _, ticket, request = heappop(self.heap)
            if request.ticket == ticket:
                self._stop(request)
                self._end(request)

    def _end(self, request: Request) -> None:
        request.end = self.now
        if not self.open and self.sent < len(self.requests):
            self.requests[self.sent].arrival = self.now
            self._enter(self.sent)
            self.sent += 1

    def _decode(self) -> None:
        while self.used + self.running > self.lane.cache_tokens and self.running > 1:
            self._preempt()
        most = self.heap[0][0] - self.step
        if self.running > 1:
            most = min(most, max(int((self.lane.cache_tokens - self.used) // self.running), 1))
        base = self.price.decode(self.running) + self.price.cached(self.running) * (
            self.offset + self.running * self.step
        )
        grow = self.price.cached(self.running) * self.running
        if self.next < self.sent:
            wait = self._ready() - self.now
            come = self.step + (_steps(base, grow, wait, most) if wait > 0.0 else 0)
            look = -(-max(come, self.step + 1) // self.over.receive) * self.over.receive
            most = min(most, look - self.step)
        self._advance(most, base * most + grow * (most * (most - 1) / 2.0))
        self._finish()

    def _preempt(self) -> None:
        """Put the youngest sequence back in front of the queue: it is computed again."""
        request = self.order.pop()
        while not request.ticket:
            request = self.order.pop()
        self._stop(request)
        self.queue.appendleft(request)
        self.out.preemptions += 1
        while self.heap and self.heap[0][2].ticket != self.heap[0][1]:
            heappop(self.heap)


def _steps(base: float, grow: float, wait: float, most: int) -> int:
    """Return how many iterations pass until `wait` seconds have, `most` at the most; each takes `grow` more."""
    if base * most <= wait:
        return most
    half = base - 0.5 * grow
    return ceil((-half + (half * half + 2.0 * grow * wait) ** 0.5) / grow) if grow > 0.0 else ceil(wait / base)
