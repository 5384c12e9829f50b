"""The iterations of one lane of a simulation: the requests they admit, the prompts they compute, and what decodes."""

from collections.abc import Sequence
from heapq import heappop
from itertools import islice
from math import ceil, inf

from flagcore_serving.model.arrivals import Arrivals
from flagcore_serving.model.sequences import Request

MIN_PIECES = 4
"""Minimum number of iterations that one prompt must fill for the simulation to compute them in one step. A choice."""


class Batches(Arrivals):
    """Computes iterations. Those between two events that only decode, or only compute pieces of long prompts, are one
    step.

    A scheduler that plans ahead knows only what happened until the time `known`. A request that arrived later joins the
    batch after the next one, and one that ended later still has its slot and its cache (`ending`), though it is not
    computed any more (vLLM 0.32 `v1/engine/core.py`: step_with_batch_queue; SGLang 0.5.23 `managers/scheduler.py`:
    event_loop_overlap).
    """

    __slots__ = ()

    def _receive(self) -> None:
        """Move requests that are ready to the queue, and those whose cache was loaded to the prompts.

        A busy engine polls only every `receive` iterations."""
        if self.coming:
            self._arrive()
        known = self._known_time() if self.lag else self.now
        if self.running and self.step % self.receive:
            return
        while self.loading and self.loading[0].loaded <= known:
            self.partial.append(self.loading.popleft())
        while self._ready_time() <= known:
            self.queue.append(self._take())

    def _known_time(self) -> float:
        """Return the time until which the scheduler knows what happened, and free what ended until then."""
        while self.ending and self.ending[0][0] <= self.known:
            _, tokens, request = self.ending.popleft()
            self.held -= tokens
            if self.block > 1:
                self._free(request, tokens, self.grown)
            self.is_closed = self.is_closed and bool(self.free)
        return self.known

    def _admit(self, started: Sequence[Request] = ()) -> bool:
        """Admit the first request of the queue if a slot and enough cache are free; return whether it was admitted. If
        no other sequence runs, the request is admitted even if the cache is too small.

        Requests whose cache is in other tiers first load it, one after the other, while the next ones are admitted
        (vLLM 0.33 `v1/core/sched/scheduler.py`: WAITING_FOR_REMOTE_KVS)."""
        lane, price, computed = self.lane, self.price, len(started)
        ended = computed + len(self.ending)
        while self.queue and not self.is_closed:
            taken = self.running + self.others + len(self.partial) + len(self.loading) + ended
            if taken >= price.needed:
                price.needed = taken + 1.0
            if taken >= lane.running:
                return False
            place = self._admissible(computed) if lane.adapters or self.free else 0
            if place is None:
                return False
            request = self.queue[place]
            cached = self._cached_tokens(request)
            if request.parts:
                cached += sum([size for part, size in request.parts if not self.holders.get(part)])
            required_tokens = cached + lane.admits
            if self.reserve:
                required_tokens += self._future(request) + lane.block * (computed + 1) + 1 - self._slots()
            filled = self.used + self.held + required_tokens
            if filled > price.filled:
                price.filled = filled
            if filled > self.capacity and (self.running or self.others or ended or self.loading):
                if self.block != lane.block:
                    self._count_blocks(started)
                    continue
                self.is_closed = self.reserve > 0.0 < self.running
                return False
            del self.queue[place]
            if lane.adapters:
                self._use_adapter(request)
            if self.reserve:
                self.promised += min(request.output, self.reserved)
            hit = max(request.hit, self._found(request)) if request.kept else request.hit
            self.used += cached
            for part, _ in request.parts:
                self.holders[part] = self.holders.get(part, 0) + 1
            request.done = min(self.prefix + hit, request.prompt + request.made - 1.0)
            if not request.load or self.overheads.loads_by_layer:
                self.partial.append(request)
                return True
            self.link = request.loaded = max(self.link, self.now) + request.load
            request.load = 0.0
            self.loading.append(request)
        return False

    def _future(self, request: Request) -> float:
        """Return the tokens to reserve for what a request, those admitted before it, and in part those that run will
        still generate (SGLang 0.5.6 `managers/schedule_policy.py`: PrefillAdder)."""
        future = float(self.finish - self.running * self.step)
        if self.lag and not self.free:  # tokens in flight are not known
            future += self._slots() - self.resting
        if self.longest > self.reserved:
            running = [end - self.step for end, ticket, each in self.heap if each.ticket == ticket]
            future += sum([min(self.reserved - left, 0.0) for left in running])
        if self.groups and not self.overheads.own_groups:
            future += sum([group.finish - group.running * group.step for group in self.groups])
        fallen = self.falls * (self.step - self.since) * (len(self.free) or 1)
        share = max(self.reserve - fallen, self.least)
        return min(request.output - request.made, self.reserved) + self.promised + share * future

    def _found(self, request: Request) -> float:
        """Return the tokens of a preempted sequence whose blocks are still in the cache: no other sequence has taken
        them. Free blocks are taken in the order in which they became free, the last block of a sequence first (vLLM
        0.32 `v1/core/block_pool.py`: free_blocks; `single_type_kv_cache_manager.py`: free)."""
        whole = request.prompt + request.made - 1.0 - self.prefix
        taken = self.used + self.held + self.freed
        found = request.kept - taken + self.parts - max(self.front + self.taken - taken, 0.0)
        found = max(min(found, whole), 0.0)
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

    def _prompts(self) -> bool:
        """Compute an iteration with pieces of prompts; return False if there are no prompts to compute.

        A prompt belongs to one attention DP rank, which has a scheduler and a budget of its own (vLLM
        `docs/serving/data_parallel_deployment.md`; SGLang `managers/data_parallel_controller.py`).
        """
        admits = self._has_room()
        partial, lane = self.partial, self.lane
        if not (partial or (admits and self.queue)):
            return False
        decoding = self.running if lane.mixes else 0
        budget = lane.budget - decoding * (1.0 + lane.drafted)
        if partial:
            if not self.free and self._pieces(decoding, budget):
                return True
        elif budget > 0.0 and not self._admit():
            return False
        tokens = pairs = longest = encode = load = 0.0
        ended: list[Request] = []
        most, chunk, continued = budget / lane.ranks, lane.chunk, 0
        while budget > 0 and (continued < len(partial) or (admits and self._admit(ended))):
            request = partial[continued]
            total, done = request.prompt + request.made, request.done
            if request.encode or request.load:
                encode, load = encode + request.encode, load + request.load
                request.encode = request.load = 0.0
            piece = total - done
            if piece > most or piece > budget:
                piece = min(budget, most)
            if chunk and done + piece < total:
                piece -= (done + piece) % chunk
                if piece <= 0:
                    break
            pairs += piece * (done + 0.5 * piece)
            request.done = done = done + piece
            tokens, budget = tokens + piece, budget - piece
            if piece > longest:
                longest = piece
            if done >= total:
                ended.append(request)
                del partial[continued]
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
        else:
            self.known = self.now + (1.0 - self.lag) * time
        if decoding:
            self._advance(self._tokens(1) if self.gain > 1.0 else 1, time)
        else:
            self._pause(time)
        for request in ended:
            self._start(request)
        self._finish()
        return True

    def _pieces(self, decoding: int, budget: float) -> bool:
        """Compute in one step all iterations in which each attention DP rank computes a piece of one long prompt.

        Return False if they are at most `MIN_PIECES`, or if a rank has no such prompt. The last pieces are left to
        `_prompts`. No decoding sequence ends before the last of these iterations.
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
            self._pause(time)
        self.known = self.now - self.lag * time / count
        return True

    def _through(self, time: float, decoding: int) -> float:
        """Return the seconds until a batch has passed all pipeline stages, since the group's last call ended. `time`:
        the seconds that the batch takes alone. Its sequences need their last tokens first if they decode."""
        end, free = max(self.known, self.now) if decoding else self.known, self.free
        part = time / len(free)
        for stage, busy in enumerate(free):
            end = free[stage] = (busy if busy > end else end) + part
        return end - self.now

    def _start(self, request: Request) -> None:
        """Start to decode a request whose prompt was just computed, which yielded one token. This token is the first
        one of the request or, after a preemption, its next one."""
        if request.first < 0:
            request.first = self.now
        if self.reserve:
            self.promised -= min(request.output, self.reserved)
        request.made += 1
        if self.block == 1 or (request.prompt + request.made - self.prefix) % self.block == 1.0:  # the first of a block
            self.used += self.block
            self.grown += self.block
        if request.made >= request.output:
            self._end(request, self._leave_cache(request))
        else:
            self._join(request)

    def _advance(self, steps: int, time: float) -> None:
        """Add `steps` tokens to all running sequences in `time` seconds. The first gap includes the time for which
        sequences waited for prompts."""
        gap, running, others, gaps = time / steps, self.running, self.running, self.gaps
        if self.joined:
            for since, number in self.joined.items():
                gaps.append((gap + self.stalled - since, number))
                others -= number
            self.joined.clear()
        if others > 0:
            gaps.append((gap + self.stalled, others))
        if steps > 1:
            gaps.append((gap, running * (steps - 1)))
        self.stalled, self.resting = 0.0, 0
        self.now += time
        self.grown = grown = self._grown(steps) if self.block > 1 else running * steps
        self.used += grown
        self.step += steps

    def _pause(self, time: float) -> None:
        """Let the running sequences wait for prompts."""
        self.now += time
        self.stalled += time if self.running else 0.0
        self.resting = self._slots()

    def _finish(self) -> None:
        heap, step = self.heap, self.step
        while heap and (heap[0][0] <= step or heap[0][2].ticket != heap[0][1]):
            _, ticket, request = heappop(heap)
            if request.ticket == ticket:
                self._end(request, self._stop(request))

    def _end(self, request: Request, tokens: float = 0.0) -> None:
        """End a request whose cache had `tokens`."""
        request.end = self.now
        if self.lag:
            self.ending.append((self.now, tokens, request))
            self.held += tokens
        elif self.block > 1:
            self._free(request, tokens, self.grown)
        if self.free or not self.lag:
            self.is_closed = False
        if not self.open and self.sent < len(self.requests):
            self.requests[self.sent].arrival = self.now + self.think_s
            self._send(self.sent)
            self.sent += 1

    def _decode(self) -> None:
        price, running, step = self.price, self.running, self.step
        steps = self.heap[0][0] - step
        filled = self.used + self.held + running * (steps + self.block - 1.0)
        if filled > price.filled:
            price.filled = filled
        if filled > self.capacity and running > 1:
            steps = self._fitting(steps)
        gain, cached = self.gain, price.cached(running)
        count = self._iterations(steps) if gain > 1.0 else steps
        if self.ending and self.queue:
            count = min(count, ceil(self.lag))
        base = gain * (price.decode(running) + cached * (self.offset + running * step))
        growth = gain * gain * cached * running
        if self.next < self.sent or self.loading:
            wait = self._next_time() - self.now
            arrival_step = step + (steps_within(base, growth, wait + self.lag * base, count) if wait > 0.0 else 0)
            poll_step = -(-max(arrival_step, step + 1) // self.receive) * self.receive
            count = min(count, poll_step - step)
        start = self.now
        self._advance(self._tokens(count) if gain > 1.0 else count, base * count + growth * (count * (count - 1) / 2.0))
        if count > 1 or not self.lag:  # otherwise without rounding: ends are compared
            start = self.now - self.lag * (base + growth * (count - 1))
        self.known = max(self.known, start)
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


def steps_within(base: float, growth: float, wait: float, limit: int) -> int:
    """Return the number of iterations until `wait` seconds have passed, at most `limit`. The first iteration takes
    `base` seconds, and each further one `growth` seconds more than the one before."""
    if limit * (base + 0.5 * growth * (limit - 1)) <= wait:
        return limit
    half = base - 0.5 * growth
    return ceil((-half + (half * half + 2.0 * growth * wait) ** 0.5) / growth) if growth > 0.0 else ceil(wait / base)
