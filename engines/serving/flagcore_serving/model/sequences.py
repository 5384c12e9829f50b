"""The requests of a simulation and its result, the sequences that decode, and the cache that they and prompts take."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from flagcore_serving.model.price import Price


class Request:
    """One request: lengths in tokens, and times in seconds.

    - `hit`: tokens at the start of the prompt that the prefix cache has.
    - `load`: seconds to load those of them that are not on the devices.
    - `read`, `encode`: seconds that its images take in the front end and in the vision tower.
    - `adapter`: the adapter that it uses; -1 if it needs no slot.
    - `parts`: the parts of its prompt that other requests have, too, with their tokens, `shared` in total.
    - `first`, `end`: times of the first and the last token; -1 if there is none yet.

    The fields from `done` on are internal to the simulation. It is no dataclass, because its `__init__` is compiled.
    """

    __slots__ = (
        *("arrival", "prompt", "output", "hit", "load", "read", "encode", "adapter", "first", "end", "parts", "shared"),
        *("done", "made", "loaded", "kept", "since", "context", "ticket", "group"),
    )

    def __init__(self, arrival: float, prompt: int, output: int) -> None:
        self.arrival, self.prompt, self.output = arrival, prompt, output
        self.first, self.end, self.adapter = -1.0, -1.0, -1
        self.hit = self.load = self.read = self.encode = self.done = self.loaded = self.kept = 0.0
        self.made = self.since = self.context = self.ticket = self.group = self.shared = 0
        self.parts: Sequence[tuple[int, int]] = ()

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrival

    @property
    def tpot_s(self) -> float:
        """The seconds per token after the first one; 0 for an answer of one token."""
        return (self.end - self.first) / (self.output - 1.0) if self.output > 1 else 0.0

    @property
    def e2e_s(self) -> float:
        return self.end - self.arrival


@dataclass(slots=True)
class SimulatedRun:
    """The result of a simulation: the requests in order, and the gaps between tokens as (seconds, number of gaps).

    `is_stopped`: whether it ended before all its requests.
    """

    requests: list[Request]
    gaps: list[tuple[float, int]] = field(default_factory=list)
    preemptions: int = 0
    duration: float = 0.0
    is_stopped: bool = False


class Group:
    """The sequences that take turns with others in a pipeline. The attributes are those of `Sequences`."""

    __slots__ = (
        *("finish", "grown", "heap", "is_closed", "joined", "now", "offset", "phases", "running", "stalled", "step"),
    )

    def __init__(self, block: int) -> None:
        self.phases, self.heap, self.joined = [0] * block, list[tuple[int, int, Request]](), dict[float, int]()
        self.now, self.stalled, self.is_closed = 0.0, 0.0, False
        self.grown = self.step = self.running = self.offset = self.finish = 0


class Sequences:
    """Keeps sums over the sequences of a lane, so that an iteration does nothing for each of them.

    - `now`: the end of the last iteration. `known`: the time until which the scheduler knows what happened.
    - `used`: tokens of the cache that are taken. Until the cache may be too small, each sequence has `beside` more, at
      least what its last block does not use. Then whole blocks are counted: `block` is their number of tokens.
    - `phases`: by step modulo `block`, the running sequences that take another block in it.
    - `offset` + running x `step`: context tokens of the running sequences.
    - `finish` - running x `step`: remaining output tokens of the running sequences.
    - `freed`: tokens of blocks that were taken, and are not any more, since whole blocks are counted; `parts`: those of
      blocks in part, of which `front` were free when `taken` had been taken. They are taken first.
    - `promised`: output tokens of admitted requests whose prompts are not yet computed.
    - `grown`: tokens of blocks that the next step needs; with pipeline stages, those of the group whose turn it is.
      `resting`: those of sequences that were not in the last iteration, so that the engine has not taken them yet.
    - `ending`: times at which requests ended, and their cached tokens (`held`), which are still taken.
    - `is_closed`: whether none is admitted until a sequence ends: one was refused while others ran, and the engine
      reserves answers. `reserve`: the share that it reserved in the step `since`.
    - `joined`: sequences that joined while others waited for prompts, and since when.

    With pipeline stages, which become `free` at times, `step`, `running`, `offset`, `finish`, `heap`, `phases`,
    `joined`, `stalled` and `now`, the end of its last call, are those of the group `turn`; the `groups` have those of
    the others, of which `others` sequences run. `Simulation` has their `calls`.
    """

    __slots__ = (
        *("price", "lane", "overheads", "prefix", "capacity", "beside", "block", "is_closed", "phases", "preemptions"),
        *("reserve", "holders", "used_adapters", "in_slots", "queue", "partial", "loading", "heap", "order", "ending"),
        *("lag", "gain", "made", "now", "known", "held", "stalled", "used", "freed", "link", "promised", "joined"),
        *("step", "running", "offset", "finish", "tickets", "turn", "others", "grown", "resting", "free", "groups"),
        *("idle_s", "steady", "growth", "marks", "periods", "members", "calls", "receive", "since", "front", "parts"),
        *("entry", "falls", "least", "prompt_token", "request", "reserved", "restored", "taken"),
    )

    def __init__(self, price: Price) -> None:
        self.price, self.lane, self.overheads = price, price.lane, price.overheads
        self.receive: int = self.overheads.receive
        scale: float = self.overheads.reserve_of_ranks if self.lane.ranks > 1.0 else 1.0
        self.reserved: float = self.overheads.reserved
        self.restored: float = self.overheads.reserve * scale
        self.falls: float = self.overheads.falls * scale
        self.least: float = self.overheads.least * scale
        self.reserve = self.restored
        self.entry: float = self.overheads.entry
        self.request: float = self.overheads.request
        self.prompt_token: float = self.overheads.prompt_token
        self.prefix, self.capacity = self.lane.shared_prefix, self.lane.cache_tokens
        self.beside, self.block = self.lane.block - 1.0 + self.lane.fixed, 1
        self.is_closed, self.phases, self.holders = False, list[int](), dict[int, int]()
        self.used_adapters, self.in_slots = Counter[int](), dict[int, None]()
        self.queue, self.partial, self.loading = deque[Request](), deque[Request](), deque[Request]()
        self.heap, self.order, self.joined = list[tuple[int, int, Request]](), list[Request](), dict[float, int]()
        self.ending = deque[tuple[float, float, Request]]()
        self.lag, self.gain = self.lane.ahead, self.lane.gain  # in iterations; tokens of one
        self.made = 0.0  # parts of a token
        self.now = self.known = self.held = self.stalled = self.used = self.freed = self.link = self.promised = 0.0
        self.step = self.running = self.offset = self.finish = self.tickets = self.turn = self.others = self.grown = 0
        self.preemptions = self.steady = self.resting = self.since = 0
        self.front = self.parts = self.taken = 0.0
        self.free, self.groups, self.members = list[float](), list[Group](), tuple[int, ...]()
        self.calls, self.idle_s, self.growth = deque[float](), 0.0, 0.0
        if self.lane.stages > 1.0:
            self.lag, self.free = 1.0, [0.0] * int(self.lane.stages)
            self._count_blocks()
            self.groups = [Group(self.block) for _ in self.free]
        self.marks, self.periods = self.free.copy(), self.free.copy()

    def _cached_tokens(self, request: Request) -> float:
        """Return how many tokens of the cache a request occupies, including its states and the unused part of its last
        block."""
        tokens = request.prompt + request.made - self.prefix - request.shared
        return tokens + self.beside if self.block == 1 else tokens + -tokens % self.block + self.lane.fixed

    def _leave_cache(self, request: Request) -> float:
        """Free the cache of a request, and return its tokens."""
        tokens = self._cached_tokens(request)
        self.used -= tokens
        if request.parts:
            for part, _ in request.parts:
                self.holders[part] -= 1
            self.used -= sum([size for part, size in request.parts if not self.holders[part]])
        if self.block == 1 or not self._last(request):
            self.grown -= self.block
        if self.lane.adapters and request.adapter >= 0:
            self.used_adapters[request.adapter] -= 1
            self.used_adapters += Counter()  # without adapters that no request uses
        return tokens

    def _last(self, request: Request) -> float:
        """Return the computed tokens in the last block of a request; 0 if all its blocks are full."""
        return (request.prompt + request.made - 1 - self.prefix) % self.block

    def _free(self, request: Request, tokens: float, due: float) -> None:
        """Let others take the blocks of a request, beside `due` tokens that count as taken, but are taken now."""
        self.freed += tokens if self._last(request) else tokens - self.block  # without one that it has not taken
        if self._last(request):
            before, self.taken = self.taken, self.used + self.held + self.freed - due
            self.front = max(self.front + before - self.taken, 0.0) + self.block
            self.parts += self.block

    def _join(self, request: Request) -> None:
        """Add a request to the decoding sequences."""
        self.running += 1
        if self.stalled:
            self.joined[self.stalled] = self.joined.get(self.stalled, 0) + 1
        self.tickets = ticket = self.tickets + 1
        step, made = self.step, request.made
        end = step + request.output - made
        request.context, request.since, request.ticket, request.group = request.prompt + made, step, ticket, self.turn
        self.offset += request.context - step
        if self.block > 1:
            self.phases[self._phase(request)] += 1
        self.finish += end
        self.order.append(request)
        heappush(self.heap, (end, ticket, request))

    def _stop(self, request: Request) -> float:
        """Take a request out of the decoding sequences, and return the tokens of its cache."""
        self.running -= 1
        self.offset -= request.context - request.since
        if self.block > 1:
            self.phases[self._phase(request)] -= 1
        self.finish -= request.since + request.output - request.made
        request.made += self.step - request.since
        request.ticket = 0
        return self._leave_cache(request)

    def _phase(self, request: Request) -> int:
        """Return the place in `phases` of the steps in which a running sequence takes another block."""
        return int(request.since + 1 - request.context + self.prefix) % self.block

    def _slots(self) -> int:
        """Return the tokens of the blocks that only the last tokens of the running sequences need."""
        return self.running if self.block == 1 else self.block * self.phases[self.step % self.block]

    def _grown(self, steps: int) -> int:
        """Return the tokens of the blocks that the running sequences take in the next steps."""
        first = (self.step + 1) % self.block
        if steps == 1:
            return self.block * self.phases[first]
        cycles, rest = divmod(steps, self.block)
        last = first + rest
        taken = cycles * self.running + sum(self.phases[first:last])
        return self.block * (taken + sum(self.phases[: max(last - self.block, 0)]))

    def _fitting(self, steps: int) -> int:
        """Return for how many of the next steps the running sequences have blocks: at least for one."""
        self._count_blocks()
        free = int(max(self.capacity - self.held - self.used, 0.0)) // self.block
        cycles, free = divmod(free, self.running)
        found = cycles * self.block + 1
        if self.block > 1:
            while found < steps and free >= (taken := self.phases[(self.step + found) % self.block]):
                found, free = found + 1, free - taken
        return min(found, steps)

    def _count_blocks(self, started: Sequence[Request] = ()) -> None:
        """Count whole blocks from now on, if they are larger than a token. `started`: requests whose prompts this
        iteration completes."""
        if self.block == self.lane.block:
            return
        self.block, lasting = int(self.lane.block), (*self.partial, *self.loading, *started)
        self.phases, self.used = [0] * self.block, sum(map(self._cached_tokens, lasting))
        sizes = dict([part for request in (*lasting, *self.order) for part in request.parts])
        self.used += sum([size for part, size in sizes.items() if self.holders.get(part)])
        for request in self.order:
            if request.ticket:
                self.phases[self._phase(request)] += 1
                tokens = request.context + self.step - request.since - self.prefix - request.shared
                self.used += tokens + -tokens % self.block + self.lane.fixed

    def _has_room(self) -> bool:
        """Preempt sequences until those that run have slots for their last tokens; return whether none was preempted.
        Only then an iteration admits requests."""
        if self.used + self.held <= self.capacity:
            return True
        self._count_blocks()
        before = self.preemptions
        while self.used + self.held > self.capacity and self.running + self.others > 1:
            self._preempt()
        if self.falls and self.preemptions > before:  # 20: SGLANG_RETRACT_DECODE_STEPS
            outputs = sum([each.output for _, ticket, each in self.heap if each.ticket == ticket])
            known = outputs - self.finish + self.running * (self.step + 20.0 - self.lag)
            self.reserve, self.since = min(known / (outputs + 1.0), 1.0), self.step + 1
        return self.preemptions == before

    def _preempt(self) -> None:
        """Move a sequence to the queue, so that it is computed again (SGLang: `managers/schedule_batch.py`,
        _get_decode_retraction_order)."""
        self.price.filled = inf
        if self.overheads.preempted_last and self.running > 1:
            running = [each for _, ticket, each in self.heap if each.ticket == ticket]
            least = min([(each.made - each.since, -each.prompt, -each.ticket) for each in running])
            request = next(each for each in running if each.ticket == -least[2])
            self.order = [each for each in self.order if each is not request]
        else:
            request = self.order.pop()
            while not request.ticket:
                request = self.order.pop()
        turn, over = self.turn, self.used + self.held - self.capacity
        self._switch(request.group)
        self._free(request, self._stop(request), over)
        request.loaded = self.now  # its tokens in flight are awaited before it is computed again
        if self.lane.finds and self.block > 1:
            request.kept = self.capacity + self.freed - self.parts
        if self.overheads.preempted_last:
            self.queue.append(request)
        else:
            self.queue.appendleft(request)
        self.preemptions, self.is_closed = self.preemptions + 1, False
        while self.heap and self.heap[0][2].ticket != self.heap[0][1]:
            heappop(self.heap)
        self._switch(turn)

    def _switch(self, turn: int) -> None:
        """Turn to another group of sequences."""
        if turn == self.turn:
            return
        self._store()
        self.others += self.running
        group, self.turn = self.groups[turn], turn
        self.now, self.step, self.running, self.offset = group.now, group.step, group.running, group.offset
        self.finish, self.heap, self.phases = group.finish, group.heap, group.phases
        self.joined, self.stalled, self.is_closed = group.joined, group.stalled, group.is_closed
        self.used += group.grown - self.grown
        self.grown = group.grown
        self.others -= group.running
        group.finish = group.running = 0

    def _store(self) -> None:
        group = self.groups[self.turn]
        group.now, group.step, group.running, group.offset = self.now, self.step, self.running, self.offset
        group.finish, group.heap, group.phases = self.finish, self.heap, self.phases
        group.joined, group.stalled, group.grown, group.is_closed = (
            self.joined,
            self.stalled,
            self.grown,
            self.is_closed,
        )
