"""Simulates the scheduler of an engine: continuous batching, and chunked prefill together with decoding.

Between two events (an arrival, an end, a full cache) only the context grows, so the simulation computes all decoding
iterations between them in one step: its run time depends on the number of requests, not of tokens. The simulation is
deterministic. Sources: the schedulers of vLLM (Kwon et al. 2023, arXiv 2309.06180; v1 `core/sched/scheduler.py`) and
SGLang (`managers/scheduler.py`).
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from math import ceil, inf

from flagcore_serving.model.price import Price
from flagcore_serving.model.request import Request, SimulatedRun
from flagcore_serving.model.vision import ImageWork

MIN_PIECES = 4
"""Minimum number of iterations that one prompt must fill for the simulation to compute them in one step. A choice."""

STEADY_TURNS, EVEN = 2, 1.01
"""The turns of all groups of a pipeline in which nothing changes, before the next ones are computed in one step, and
how much the times of the last ones may differ, relative to the growth of a turn. Choices."""

CHECKED = 64
"""The number of events between two checks whether a simulation has failed. A choice."""


@dataclass(slots=True)
class _Group:
    """The sequences that take turns with others in a pipeline. The fields are those of `Simulation`."""

    phases: list[int]
    heap: list[tuple[int, int, Request]] = field(default_factory=list)
    joined: dict[float, int] = field(default_factory=dict)
    now: float = 0.0
    stalled: float = 0.0
    grown: int = 0
    step: int = 0
    running: int = 0
    offset: int = 0
    finish: int = 0


class Simulation:
    """A simulation of requests on one lane.

    - `lengths`: (prompt tokens, output tokens) of each request.
    - `arrivals`: times at which requests are sent. If None, `concurrency` requests are sent at once, and then one
      request `think_s` seconds after the end of another one.
    - `hits`: prompt tokens in the prefix cache, besides the prefix that all requests share.
    - `loads`: seconds to load those of them that are not on the devices.
    - `images`: the work for the images of each request.
    - `adapters`: the adapter of each request, if the slots do not hold all.
    - `parts`: the parts of each prompt, after the prefix that all share, which others have, too: their numbers and
      tokens. The cache has one copy for all that need it (`holders`).

    Sums over sequences are stored as attributes:

    - `used`: tokens of the cache that are taken. Until the cache may be too small, each sequence has `beside` more, at
      least what its last block does not use. Then whole blocks are counted: `block` is their number of tokens.
    - `phases`: by step modulo `block`, the running sequences that take another block in it.
    - `offset` + running x `step`: context tokens of the running sequences.
    - `finish` - running x `step`: remaining output tokens of the running sequences.
    - `freed`: tokens of whole blocks that were taken, and are not any more, since whole blocks are counted.
    - `promised`: output tokens of admitted requests whose prompts are not yet computed.
    - `grown`: tokens of blocks that the next step needs; with pipeline stages, those of the group whose turn it is.

    A scheduler that plans ahead knows only what happened until the time `known`. A request that arrived later joins the
    batch after the next one, and one that ended later still has its slot and its cache (`ending`, and `held` tokens of
    them), though it is not computed any more (vLLM 0.32 `v1/engine/core.py`: step_with_batch_queue; SGLang 0.5.23
    `managers/scheduler.py`: event_loop_overlap).

    With pipeline stages, as many groups of sequences as stages take turns: the scheduler's call k is for the group k
    modulo the stages, and comes as soon as that of the stages (and `Lane.ahead`) before it has ended. A sequence stays
    in the group in which its prompt ended, so groups are uneven. A call without work is a call, too (sources as above;
    vLLM 0.32 `core/sched/async_scheduler.py`: next_decode_eligible_step; SGLang `scheduler_pp_mixin.py`). The effects
    of a call are stored at once, with times in the future, and `known` is the time of the call. `step`, `running`,
    `offset`, `finish`, `heap`, `phases`, `joined`, `stalled` and `now`, the end of its last call, are those of the
    group `turn`; the `groups` have those of the others, of which `others` sequences run.
    """

    def __init__(
        self,
        price: Price,
        lengths: Sequence[tuple[int, int]],
        arrivals: Sequence[float] | None,
        concurrency: int,
        hits: Sequence[float] = (),
        think_s: float = 0.0,
        images: Sequence[ImageWork] = (),
        loads: Sequence[float] = (),
        adapters: Sequence[int] = (),
        parts: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        self.think_s = think_s
        self.price, self.lane, self.overheads, self.open = price, price.lane, price.overheads, arrivals is not None
        self.prefix, self.beside = self.lane.shared_prefix, self.lane.block - 1.0 + self.lane.fixed
        self.block, self.is_tight, self.phases = 1, False, list[int]()
        times = arrivals if arrivals is not None else [0.0] * min(concurrency, len(lengths))
        self.requests = [
            Request(times[index] if index < len(times) else inf, int(prompt), max(int(output), 1))
            for index, (prompt, output) in enumerate(lengths)
        ]
        for index, hit in enumerate(hits):
            self.requests[index].hit = hit
        for index, load in enumerate(loads):
            self.requests[index].load = load
        for index, adapter in enumerate(adapters):
            self.requests[index].adapter = adapter
        for index, each in enumerate(parts):
            self.requests[index].parts, self.requests[index].shared = each, sum([size for _, size in each])
        self.holders = Counter[int]()
        self.used_adapters, self.in_slots = Counter[int](), dict[int, None]()
        self.apart: list[tuple[float, float, float]] = []
        self._add_images(price, images)
        self.coming: list[tuple[float, int]] = []  # requests whose images are being encoded, and when they are ready
        self.entered: list[Request] = []
        self.parse_ends: list[float] = []
        self.parse_groups: list[int] = []
        self.queue: deque[Request] = deque()
        self.partial: deque[Request] = deque()
        self.loading: deque[Request] = deque()
        self.heap: list[tuple[int, int, Request]] = []
        self.order: list[Request] = []
        self.ending: deque[tuple[float, float]] = deque()  # times at which requests ended, and their cached tokens
        self.lag, self.gain = self.lane.ahead, self.lane.gain  # in iterations; tokens of one
        self.made = 0.0  # parts of a token
        self.now = self.known = self.held = self.stalled = self.used = self.freed = 0.0
        self.tokenized = self.link = self.encoded = self.idle_s = self.promised = 0.0
        self.longest = max((request.output for request in self.requests), default=0)
        self.joined: dict[float, int] = {}  # sequences that joined while others waited for prompts, and since when
        self.ready_s = -1.0  # unknown
        self.group_arrival, self.calls = -1.0, deque[float]()  # the ends of the calls in flight
        self.step = self.running = self.offset = self.finish = self.tickets = self.next = 0
        self.sent, self.turn, self.others, self.grown = len(times), 0, 0, 0
        self.steady, self.growth, self.marks, self.periods = 0, 0.0, list[float](), list[float]()
        self.free, self.groups, self.members = list[float](), list[_Group](), list[int]()
        if self.lane.stages > 1.0:
            self.lag, self.free = 1.0, [0.0] * int(self.lane.stages)
            self.marks, self.periods = self.free.copy(), self.free.copy()
            self._count_blocks()
            self.groups = [_Group(phases=[0] * self.block) for _ in self.free]
        self.outcome = SimulatedRun(self.requests)
        for index in range(self.sent):
            self._send(index)

    def _add_images(self, price: Price, images: Sequence[ImageWork]) -> None:
        """Set the seconds that the images of each request take. `price`: the times of the instance with the vision
        tower, or that gets the embeddings."""
        if price.encoders is not None:
            self.apart = price.encoders.times(images)
            return
        for request, work, encode in zip(self.requests, images, price.encoding(images), strict=False):
            request.read, request.encode = work.read_s, encode

    def run(self, has_failed: Callable[[float], bool] | None = None) -> SimulatedRun:
        """Simulate all requests. `has_failed` gets the current time after every `CHECKED` events; the run is stopped
        if it returns true."""
        for turn in count(1):
            if has_failed is not None and turn % CHECKED == 0 and has_failed(self.now):
                self.outcome.is_stopped = True
                break
            if self.free:
                if not self._call():
                    break
                continue
            self._receive()
            if not (self.queue or self.partial or self.running or self.loading) and self.next >= self.sent:
                break
            if not (self.queue or self.partial or self.running):
                self.now = self._next_time()
            elif not self._prompts():
                if self.running:
                    self._decode()
                else:
                    self.now = self._next_time()
        self.outcome.duration = max(self.now, *self.free) if self.free else self.now
        return self.outcome

    def _send(self, index: int) -> None:
        """Send a request to the front end or, if it has images for other instances, first to these."""
        arrival = self.requests[index].arrival
        if not self.apart:
            self._enter(self.requests[index], arrival)
            return
        busy_s, least_s, sending_s = self.apart[index] if index < len(self.apart) else (0.0, 0.0, 0.0)
        if busy_s:
            self.encoded = max(self.encoded, arrival) + busy_s
            arrival = max(self.encoded, arrival + least_s) + sending_s
        heappush(self.coming, (arrival, index))

    def _arrive(self) -> None:
        while self.coming and self.coming[0][0] <= (self.known if self.free else self.now):
            arrival, index = heappop(self.coming)
            self._enter(self.requests[index], arrival)

    def _enter(self, request: Request, arrival: float) -> None:
        """Pass a request through the front end. The front end parses simultaneous requests together: all are ready when
        the last one is."""
        self.entered.append(request)
        if not self.parse_ends or arrival != self.group_arrival:
            self.parse_ends.append(max(self.parse_ends[-1] if self.parse_ends else 0.0, arrival))
            self.group_arrival = arrival
        self.parse_ends[-1] += self.overheads.entry
        self.parse_groups.append(len(self.parse_ends) - 1)
        self.ready_s = -1.0

    def _tokenized_time(self) -> float:
        """Return the time at which the next request is tokenized. One thread tokenizes all requests in order."""
        parsed = max(self.parse_ends[self.parse_groups[self.next]], self.tokenized)
        request = self.entered[self.next]
        return parsed + self.overheads.prompt_token * request.prompt + request.read

    def _ready_time(self) -> float:
        if self.ready_s < 0.0:
            is_there = self.next < len(self.entered)
            self.ready_s = self._tokenized_time() + self.overheads.request if is_there else inf
        return self.ready_s

    def _take(self) -> Request:
        """Return the next request, which is ready."""
        self.tokenized, self.ready_s = self._tokenized_time(), -1.0
        self.next += 1
        return self.entered[self.next - 1]

    def _next_time(self) -> float:
        """Return the time at which the next request is ready, or has its cache or the embeddings of its images."""
        ready = self._ready_time() if self.next < self.sent else inf
        ready = min(ready, self.coming[0][0]) if self.coming else ready
        return min(ready, self.loading[0].loaded) if self.loading else ready

    def _receive(self) -> None:
        """Move requests that are ready to the queue, and those whose cache was loaded to the prompts.

        A busy engine polls only every `receive` iterations."""
        if self.coming:
            self._arrive()
        known = self._known_time() if self.lag else self.now
        if self.running and self.step % self.overheads.receive:
            return
        while self.loading and self.loading[0].loaded <= known:
            self.partial.append(self.loading.popleft())
        while self._ready_time() <= known:
            self.queue.append(self._take())

    def _known_time(self) -> float:
        """Return the time until which the scheduler knows what happened, and free what ended until then."""
        if not (self.running or self.partial or self.free):
            self.known = self.now
        while self.ending and self.ending[0][0] <= self.known:
            self.held -= self.ending.popleft()[1]
        return self.known

    def _cached_tokens(self, request: Request) -> float:
        """Return how many tokens of the cache a request occupies, including its states and the unused part of its last
        block."""
        tokens = request.prompt + request.made - self.prefix - request.shared
        return tokens + self.beside if self.block == 1 else tokens + -tokens % self.block + self.lane.fixed

    def _admit(self, ended: int) -> bool:
        """Admit the first request of the queue if a slot and enough cache are free; return whether it was admitted. If
        no other sequence runs, the request is admitted even if the cache is too small.

        Requests whose cache is in other tiers first load it, one after the other, while the next ones are admitted
        (vLLM 0.33 `v1/core/sched/scheduler.py`: WAITING_FOR_REMOTE_KVS)."""
        lane, computed = self.lane, ended
        ended += len(self.ending)
        while self.queue:
            taken = self.running + self.others + len(self.partial) + len(self.loading) + ended
            if taken >= self.price.needed:
                self.price.needed = taken + 1.0
            if taken >= lane.running:
                return False
            place = self._admissible(computed) if lane.adapters or self.free else 0
            if place is None:
                return False
            request = self.queue[place]
            cached = self._cached_tokens(request)
            if request.parts:
                cached += sum([size for part, size in request.parts if not self.holders[part]])
            required_tokens = cached + lane.admits
            if self.overheads.reserve:
                future = self._reserved(request) + self.promised + self.finish - self.running * self.step
                if self.longest > self.overheads.reserved:
                    running = [end - self.step for end, ticket, each in self.heap if each.ticket == ticket]
                    future += sum([min(self.overheads.reserved - left, 0.0) for left in running])
                if not self.overheads.own_groups:
                    future += sum([group.finish - group.running * group.step for group in self.groups])
                required_tokens += self.overheads.reserve * future
            filled = self.used + self.held + required_tokens
            if filled > self.price.filled:
                self.price.filled = filled
            if filled > lane.cache_tokens and (self.running or self.others or ended or self.loading):
                self.is_tight = self.block != lane.block
                return False
            del self.queue[place]
            if lane.adapters:
                self._use_adapter(request)
            if self.overheads.reserve:
                self.promised += self._reserved(request)
            hit = max(request.hit, self._found(request)) if request.kept else request.hit
            self.used += cached
            if request.parts:
                self.holders.update([part for part, _ in request.parts])
            request.done = min(self.prefix + hit, request.prompt + request.made - 1.0)
            if not request.load or self.overheads.loads_by_layer:
                self.partial.append(request)
                return True
            self.link = request.loaded = max(self.link, self.now) + request.load
            request.load = 0.0
            self.loading.append(request)
        return False

    def _reserved(self, request: Request) -> float:
        """Return the tokens of a request's answer that the cache must have free before it is admitted, if it must."""
        return min(request.output - request.made, self.overheads.reserved)

    def _found(self, request: Request) -> float:
        """Return the tokens of a preempted sequence whose blocks are still in the cache: no other sequence has taken
        them. Free blocks are taken in the order in which they became free, the last block of a sequence first (vLLM
        0.32 `v1/core/block_pool.py`: free_blocks; `single_type_kv_cache_manager.py`: free)."""
        whole = request.prompt + request.made - 1.0 - self.prefix
        found = max(min(request.kept - self.freed - self.used, whole), 0.0)
        found -= found % self.block
        self.freed -= found
        request.kept = 0.0
        return found

    def _admissible(self, computed: int) -> int | None:
        """Return the place in the queue of the first request whose adapter is in use or finds a slot, or None (vLLM
        0.33 `v1/core/sched/scheduler.py`; SGLang 0.5.23 `managers/scheduler.py`: can_schedule_lora_req). With pipeline
        stages, it must have no token in flight, and its group a free slot (SGLang: get_num_allocatable_reqs).

        `computed`: requests whose prompts the iteration completes."""
        if self.running + len(self.partial) + computed >= self.lane.group:
            return None
        is_full = self.lane.adapters and len(self.used_adapters) >= self.lane.adapters
        for place, each in enumerate(self.queue):
            is_free = not is_full or each.adapter < 0 or each.adapter in self.used_adapters
            if is_free and not (self.free and each.loaded > self.known):
                return place
        return None

    def _use_adapter(self, request: Request) -> None:
        """Give a slot to the adapter of an admitted request, in place of the one that was unused for the longest."""
        if request.adapter < 0:
            return
        self.used_adapters[request.adapter] += 1
        if request.adapter not in self.in_slots and len(self.in_slots) >= self.lane.adapters:
            del self.in_slots[next(each for each in self.in_slots if each not in self.used_adapters)]
            request.encode += self.lane.swap_s
        self.in_slots.pop(request.adapter, None)
        self.in_slots[request.adapter] = None

    def _leave_cache(self, request: Request) -> None:
        tokens = self._cached_tokens(request)
        self.used -= tokens
        if request.parts:
            self.holders.subtract([part for part, _ in request.parts])
            self.used -= sum([size for part, size in request.parts if not self.holders[part]])
        self.grown -= self._takes_block(request) and self.block
        if self.block > 1:
            computed = request.prompt + request.made - 1 - self.prefix
            self.freed += tokens - (self.block if computed % self.block else 0)  # a block in part is taken first
        if self.lane.adapters and request.adapter >= 0:
            self.used_adapters[request.adapter] -= 1
            self.used_adapters += Counter()  # without adapters that no request uses

    def _prompts(self) -> bool:
        """Compute an iteration with pieces of prompts; return False if there are no prompts to compute.

        A prompt belongs to one attention DP rank, which has a scheduler and a budget of its own (vLLM
        `docs/serving/data_parallel_deployment.md`; SGLang `managers/data_parallel_controller.py`).
        """
        admits = self._has_room()
        if not (self.partial or (admits and self.queue)):
            return False
        decoding = self.running if self.lane.mixes else 0
        budget = self.lane.budget - decoding * (1.0 + self.lane.drafted)
        if self.partial and not self.free and self._pieces(decoding, budget):
            return True
        tokens = pairs = longest = encode = load = 0.0
        ended: list[Request] = []
        most, continued = budget / self.lane.ranks, 0
        while budget > 0 and (continued < len(self.partial) or (admits and self._admit(len(ended)))):
            request = self.partial[continued]
            total = request.prompt + request.made
            encode, request.encode = encode + request.encode, 0.0
            load, request.load = load + request.load, 0.0
            piece = min(budget, most, total - request.done)
            if self.lane.chunk and request.done + piece < total:
                piece -= (request.done + piece) % self.lane.chunk
                if piece <= 0:
                    break
            pairs += piece * (request.done + 0.5 * piece)
            request.done += piece
            tokens, budget, longest = tokens + piece, budget - piece, max(longest, piece)
            if request.done >= total:
                ended.append(request)
                del self.partial[continued]
            else:
                continued += 1
        if budget <= 0.0:
            self.price.widest = inf
        if not tokens:
            return False
        time = max(self.price.mixed(decoding, tokens, longest, pairs, len(ended), encode), load)
        if decoding:
            time += self.gain * self.price.cached(self.running) * (self.offset + self.running * self.step)
        if self.free:
            time = self._through(time, decoding)
        if decoding:
            self._advance(self._tokens(1) if self.gain > 1.0 else 1, time)
        else:
            self.now += time
            self.stalled += time if self.running else 0.0
        if not self.free:
            self.known = self.now - self.lag * time
        for request in ended:
            self._start(request)
        self._finish()
        return True

    def _pieces(self, decoding: int, budget: float) -> bool:
        """Compute in one step all iterations in which each attention DP rank computes a piece of one long prompt.

        Return False if they are at most `MIN_PIECES`, or if a rank has no such prompt.
        The last pieces of the prompts are left to `_prompts`. No decoding sequence ends before the last of these
        iterations.
        """
        ranks = self.lane.ranks
        budget -= budget % (self.lane.chunk * ranks) if self.lane.chunk else 0.0
        if budget <= 0.0 or len(self.partial) < ranks:
            return False
        requests, piece = list(islice(self.partial, ceil(ranks))), budget / ranks
        least = min(request.prompt + request.made - request.done for request in requests)
        if least <= MIN_PIECES * piece:
            return False
        count = ceil(least / piece) - 1
        if decoding:
            count = min(count, self._iterations(self.heap[0][0] - self.step))
        pairs = sum(piece * (request.done + 0.5 * piece) for request in requests)
        time = self.price.pieces(decoding, budget, pairs, count, ranks)
        for request in requests:
            request.done += count * piece
        if decoding:
            read = self.gain * self.price.cached(self.running)
            context = self.offset + self.running * self.step
            time += read * count * (context + self.gain * self.running * (count - 1) / 2.0)
            self._advance(self._tokens(count), time)
            self._finish()
        else:
            self.now += time
            self.stalled += time if self.running else 0.0
        self.known = self.now - self.lag * time / count
        return True

    def _start(self, request: Request) -> None:
        """Start to decode a request whose prompt was just computed, which yielded one token. This token is the first
        one of the request or, after a preemption, its next one."""
        if request.first < 0:
            request.first = self.now
        if self.overheads.reserve:
            self.promised -= self._reserved(request)
        request.made += 1
        if self._takes_block(request):
            self.used += self.block
            self.grown += self.block
        if request.made >= request.output:
            self._leave_cache(request)
            self._end(request)
            return
        self._join(request)

    def _takes_block(self, request: Request) -> bool:
        """Return whether the last token of a request is the first one of a block."""
        return self.block == 1 or (request.prompt + request.made - self.prefix) % self.block == 1.0

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

    def _advance(self, steps: int, time: float) -> None:
        """Add `steps` tokens to all running sequences in `time` seconds. The first gap includes the time for which
        sequences waited for prompts."""
        gap, others = time / steps, self.running
        for since, number in self.joined.items():
            self.outcome.gaps.append((gap + self.stalled - since, number))
            others -= number
        if others > 0:
            self.outcome.gaps.append((gap + self.stalled, others))
        if steps > 1:
            self.outcome.gaps.append((gap, self.running * (steps - 1)))
        self.stalled = 0.0
        self.joined.clear()
        self.now += time
        self.grown = self._grown(steps) if self.block > 1 else self.running * steps
        self.used += self.grown
        self.step += steps

    def _stop(self, request: Request) -> None:
        self.running -= 1
        self.offset -= request.context - request.since
        if self.block > 1:
            self.phases[self._phase(request)] -= 1
        self.finish -= request.since + request.output - request.made
        request.made += self.step - request.since
        request.ticket = 0
        self._leave_cache(request)

    def _finish(self) -> None:
        heap, step = self.heap, self.step
        while heap and (heap[0][0] <= step or heap[0][2].ticket != heap[0][1]):
            _, ticket, request = heappop(heap)
            if request.ticket == ticket:
                self._stop(request)
                self._end(request)

    def _end(self, request: Request) -> None:
        request.end = self.now
        if self.lag:
            tokens = self._cached_tokens(request)
            self.ending.append((self.now, tokens))
            self.held += tokens
        if not self.open and self.sent < len(self.requests):
            self.requests[self.sent].arrival = self.now + self.think_s
            self._send(self.sent)
            self.sent += 1

    def _decode(self) -> None:
        steps = self.heap[0][0] - self.step
        filled = self.used + self.held + self.running * (steps + self.block - 1.0)
        if filled > self.price.filled:
            self.price.filled = filled
        if filled > self.lane.cache_tokens and self.running > 1:
            steps = self._fitting(steps)
        gain, cached = self.gain, self.price.cached(self.running)
        count = self._iterations(steps) if gain > 1.0 else steps
        if self.ending and self.queue:
            count = min(count, ceil(self.lag))
        base = gain * (self.price.decode(self.running) + cached * (self.offset + self.running * self.step))
        growth = gain * gain * cached * self.running
        if self.next < self.sent or self.loading:
            wait = self._next_time() - self.now
            arrival_step = self.step + (_steps_within(base, growth, wait + self.lag * base, count) if wait > 0.0 else 0)
            poll_step = -(-max(arrival_step, self.step + 1) // self.overheads.receive) * self.overheads.receive
            count = min(count, poll_step - self.step)
        self._advance(self._tokens(count) if gain > 1.0 else count, base * count + growth * (count * (count - 1) / 2.0))
        self.known = max(self.known, self.now - self.lag * (base + growth * (count - 1)))
        self._finish()

    def _iterations(self, tokens: int) -> int:
        """Return in how many iterations, at least one, a running sequence gets `tokens` tokens."""
        return max(ceil((tokens - self.made) / self.gain), 1) if self.gain > 1.0 else tokens

    def _tokens(self, iterations: int) -> int:
        """Return how many tokens a running sequence gets in the next iterations: with speculation, `Lane.gain` on
        average. An iteration in which it gets its last one may yield more."""
        self.made += iterations * self.gain
        tokens = int(self.made)
        self.made -= tokens
        return tokens

    def _phase(self, request: Request) -> int:
        """Return the place in `phases` of the steps in which a running sequence takes another block."""
        return int(request.since + 1 - request.context + self.prefix) % self.block

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
        free = int(max(self.lane.cache_tokens - self.held - self.used, 0.0)) // self.block
        cycles, free = divmod(free, self.running)
        found = cycles * self.block + 1
        if self.block > 1:
            while found < steps and free >= (taken := self.phases[(self.step + found) % self.block]):
                found, free = found + 1, free - taken
        return min(found, steps)

    def _count_blocks(self) -> None:
        """Count whole blocks from now on, if they are larger than a token."""
        self.is_tight = False
        if self.block == self.lane.block:
            return
        self.block, lasting = int(self.lane.block), (*self.partial, *self.loading)
        self.phases, self.used = [0] * self.block, sum(map(self._cached_tokens, lasting))
        sizes = dict([part for request in (*lasting, *self.order) for part in request.parts])
        self.used += sum([size for part, size in sizes.items() if self.holders[part]])
        for request in self.order:
            if request.ticket:
                self.phases[self._phase(request)] += 1
                tokens = request.context + self.step - request.since - self.prefix - request.shared
                self.used += tokens + -tokens % self.block + self.lane.fixed

    def _has_room(self) -> bool:
        """Preempt sequences until those that run have slots for their last tokens; return whether none was preempted.
        Only then an iteration admits requests."""
        if self.used + self.held <= self.lane.cache_tokens and not self.is_tight:
            return True
        self._count_blocks()
        before = self.outcome.preemptions
        while self.used + self.held > self.lane.cache_tokens and self.running + self.others > 1:
            self._preempt()
        return self.outcome.preemptions == before

    def _preempt(self) -> None:
        """Move a sequence to the queue, so that it is computed again (SGLang: `managers/schedule_batch.py`,
        _get_decode_retraction_order)."""
        self.price.filled = inf
        if self.overheads.preempted_last and self.running > 1:
            running = [each for _, ticket, each in self.heap if each.ticket == ticket]
            least = min([(each.made - each.since, -each.prompt, each.ticket) for each in running])
            request = next(each for each in running if each.ticket == least[2])
            self.order = [each for each in self.order if each is not request]
        else:
            request = self.order.pop()
            while not request.ticket:
                request = self.order.pop()
        turn = self.turn
        self._switch(request.group)
        self._stop(request)
        request.loaded = self.now  # its tokens in flight are awaited before it is computed again
        if self.lane.finds and self.block > 1:
            request.kept = self.lane.cache_tokens - self.held + self.freed
        if self.overheads.preempted_last:
            self.queue.append(request)
        else:
            self.queue.appendleft(request)
        self.outcome.preemptions += 1
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
        self.joined, self.stalled = group.joined, group.stalled
        self.used += group.grown - self.grown
        self.grown = group.grown
        self.others -= group.running
        group.finish = group.running = 0

    def _store(self) -> None:
        group = self.groups[self.turn]
        group.now, group.step, group.running, group.offset = self.now, self.step, self.running, self.offset
        group.finish, group.heap, group.phases = self.finish, self.heap, self.phases
        group.joined, group.stalled, group.grown = self.joined, self.stalled, self.grown

    def _call(self) -> bool:
        """Call the scheduler for the next group; return False if all requests have ended."""
        if len(self.calls) == len(self.free) + self.lane.ahead:
            self.known = max(self.known, self.calls.popleft())
        self.known += self.idle_s
        self.idle_s = 0.0
        self._switch((self.turn + 1) % len(self.free))
        period, self.marks[self.turn] = self.known - self.marks[self.turn], self.known
        if abs(period - self.periods[self.turn]) > EVEN * self.growth:
            self.steady = -1
        self.periods[self.turn] = period
        if self.turn == 0:
            self._leap()
        self._receive()
        if not self.running:
            self.now = self.known
        if self._prompts():
            self.calls.append(self.now)
        elif self.running:
            filled = self.used + self.held + (self.running + self.others) * self.block
            if filled > self.price.filled:
                self.price.filled = filled
            read = self.price.cached(self.running) * (self.offset + self.running * self.step)
            time = self.gain * (self.price.decode(self.running) + read)
            self._advance(self._tokens(1), self._through(time, self.running))
            self.calls.append(self.now)
            self._finish()
        elif self.others or self.known < max(self.calls, default=0.0):  # `free` may differ from these by rounding
            self.calls.append(self.known)
            self.idle_s = self.overheads.idle_call
        elif self.queue or self.partial or self.loading or self.next < self.sent:
            self.known = max(self.known, self._next_time())
            self.calls.clear()
        else:
            return False
        return True

    def _leap(self) -> None:
        """Compute in one step the turns in which all groups only decode: up to the one before a sequence ends, a
        request arrives, or the cache is full. Each takes as long as the last one, and the growth of the slowest group.
        """
        all_running = self.running + self.others
        members = [self.tickets, self.outcome.preemptions, all_running, len(self.queue), len(self.partial)]
        self.steady = self.steady + 1 if members == self.members else 0
        self.members = members
        if not all_running or self.partial or self.loading or self.ending:
            return
        steps, slowest, growth = 1 << 40, 0.0, 0.0
        self._store()
        for group in self.groups:
            if group.running:
                steps = min(steps, group.heap[0][0] - group.step - 1)
                cached = self.price.cached(group.running)
                time = self.price.decode(group.running) + cached * (group.offset + group.running * group.step)
                if time > slowest:
                    slowest, growth = time, self.gain**2 * cached * group.running
        self.growth, used = growth, self.used - self.grown + self.groups[-1].grown
        filled = used + self.held + all_running * (steps + self.block)
        if filled > self.price.filled:
            self.price.filled = filled
        if filled > self.lane.cache_tokens:
            steps -= ceil((filled - self.lane.cache_tokens) / all_running)
        period, wait = self.periods[0], self._next_time() - self.known
        is_even = self.steady >= STEADY_TURNS and max(self.periods) - min(self.periods) < EVEN * growth
        turns = _steps_within(period, growth, wait, int(steps / self.gain)) - 1 if is_even and wait > 0.0 else 0
        if turns > 1:
            total = turns * period + growth * (turns * (turns + 1) / 2.0)
            for turn in range(len(self.free)):
                self._switch(turn)
                self.free[turn] += total
                self.marks[turn] += total
                if self.running:
                    self._advance(self._tokens(turns - 1), total * ((turns - 1) / turns))
                    self._advance(self._tokens(1), total / turns)
            self.calls = deque([end + total for end in self.calls])
            self.known += total
        self._switch(0)

    def _through(self, time: float, decoding: int) -> float:
        """Return the seconds until a batch has passed all stages, since the group's last call ended. `time`: the
        seconds that the batch takes alone. Its sequences need their last tokens first if they decode."""
        end, free = max(self.known, self.now) if decoding else self.known, self.free
        part = time / len(free)
        for stage, busy in enumerate(free):
            end = free[stage] = (busy if busy > end else end) + part
        return end - self.now


def _steps_within(base: float, growth: float, wait: float, limit: int) -> int:
    """Return the number of iterations until `wait` seconds have passed, at most `limit`. The first iteration takes
    `base` seconds, and each further one `growth` seconds more than the one before."""
    if limit * (base + 0.5 * growth * (limit - 1)) <= wait:
        return limit
    half = base - 0.5 * growth
    return ceil((-half + (half * half + 2.0 * growth * wait) ** 0.5) / growth) if growth > 0.0 else ceil(wait / base)
