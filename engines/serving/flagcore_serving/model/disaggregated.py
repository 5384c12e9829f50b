"""Simulates a decode instance, together with the prefill instances and the transfer of their caches.

A request waits for a prefill instance, which computes the waiting prompts together, up to its limit of tokens. Their
caches then go over the link of the prefill instance, one after the other. The decode instance gives the request a slot
when its cache has room. The first token comes from its next iteration, which computes the last token of the prompt
(vllm 0.32 `kv_connector/v1/nixl`; the proxy drops the token of the prefill instance).

The stages follow DistServe (Zhong et al. 2024, arXiv 2401.09670, section 3). How the rates of both kinds are matched
follows ai-dynamo/aiconfigurator @095f58a5 `README.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import ceil, inf

from flagcore_serving.model.price import Price
from flagcore_serving.model.sequences import Request
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.vision import ImageWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The prefill instances that serve one decode instance.

    - `price`: the iteration times of a prefill instance.
    - `per_decode`: the number of prefill instances per decode instance, which may be a fraction.
    - `transfer`: seconds that the cache of one prompt token takes on the link of one prefill instance.
    """

    price: Price
    per_decode: float
    transfer: float


class _Batch:
    """Prompts that a prefill instance computes together. Their caches reach the decode instance at the time `done`.

    It and `_Server` are no dataclasses, as `Request`.
    """

    __slots__ = (
        "cached",
        "done",
        "encode",
        "end",
        "link_free",
        "longest",
        "members",
        "number",
        "pairs",
        "start",
        "tokens",
    )

    def __init__(self, start: float, link_free: float) -> None:
        self.start, self.link_free, self.members = start, link_free, list[Request]()
        self.tokens = self.pairs = self.longest = self.encode = self.end = self.done = 0.0
        self.cached = self.number = 0


class _Server:
    """One prefill instance: the times at which it and its link become free, and its last batch."""

    __slots__ = ("free", "last", "link_free")

    def __init__(self) -> None:
        self.free = self.link_free = 0.0
        self.last: _Batch | None = None


class Disaggregated(Simulation):
    """Simulates a decode instance, whose iteration times are `price`, and the prefill instances that serve it.

    A prefill instance computes as many batches at a time as it has stages.

    The number of simulated prefill instances is `prefill.per_decode`, rounded, and at least 1. They also serve other
    decode instances, so a batch of t seconds occupies an instance for t x (rounded number) / `per_decode` seconds.
    """

    def __init__(
        self,
        price: Price,
        prefill: Prefill,
        lengths: Sequence[tuple[int, int]],
        arrivals: Sequence[float] | None,
        concurrency: int,
        images: Sequence[ImageWork] = (),
    ) -> None:
        self.prefill = prefill
        self.servers = [_Server() for _ in range(max(1, round(prefill.per_decode)))]
        self.occupied, self.transfer = len(self.servers) / prefill.per_decode, prefill.transfer
        self.request_s, self.entry_s = prefill.price.overheads.request, prefill.price.overheads.entry
        self.budget, self.shared = prefill.price.lane.budget, prefill.price.lane.shared_prefix
        self.prefill_stages = prefill.price.lane.stages
        self.ready: list[tuple[float, int, _Batch]] = []
        self.batches = 0
        super().__init__(price, lengths, arrivals, concurrency, images=images)

    def _add_images(self, price: Price, images: Sequence[ImageWork]) -> None:
        super()._add_images(self.prefill.price, images)

    def _enter(self, request: Request, arrival: float) -> None:
        """Add a request to the next batch of the prefill instance that becomes free first."""
        prompt = request.prompt
        arrival = arrival + self.request_s + self.entry_s + request.read
        done = min(self.shared, prompt - 1.0)
        piece = prompt - done
        server = self.servers[0]
        for each in self.servers:
            if each.free < server.free:
                server = each
        batch = server.last
        if batch is None or arrival > batch.start or batch.tokens + piece > self.budget:
            batch = server.last = _Batch(max(arrival, server.free), server.link_free)
        is_new = not batch.members
        batch.members.append(request)
        batch.cached += prompt
        batch.tokens += piece
        batch.longest = max(batch.longest, piece)
        batch.pairs += piece * (done + 0.5 * piece)
        batch.encode += request.encode
        seconds = self._prompt_seconds(batch) + batch.encode
        later = (self.prefill_stages - 1.0) / ceil(batch.tokens / self.budget) if self.prefill_stages > 1.0 else 0.0
        batch.end = batch.start + seconds * (1.0 + later) / self.prefill_stages
        caches, sent = self.transfer * batch.cached, max(batch.end, batch.link_free)
        batch.done = sent + caches
        server.free = batch.start + seconds / self.prefill_stages * self.occupied
        server.link_free = sent + caches * self.occupied
        self.batches = batch.number = self.batches + 1
        if is_new:
            heappush(self.ready, (batch.done, batch.number, batch))

    def _prompt_seconds(self, batch: _Batch) -> float:
        """Return the time of a batch on a prefill instance, in seconds. A prompt beyond the limit of tokens takes
        several iterations."""
        price, budget = self.prefill.price, self.budget
        if batch.tokens <= budget:
            return price.mixed(0, batch.tokens, batch.longest, batch.pairs, len(batch.members))
        count = int(batch.tokens // budget)
        last_tokens, first = batch.tokens - count * budget, batch.pairs - 0.5 * batch.tokens**2
        seconds = price.pieces(0, budget, 0.5 * budget**2 + first * budget / batch.tokens, count)
        if last_tokens < 1.0:
            return seconds
        pairs = last_tokens * (count * budget + 0.5 * last_tokens) + first * last_tokens / batch.tokens
        return seconds + price.mixed(0, last_tokens, last_tokens, pairs, 1)

    def _next_done(self) -> float:
        """Return the time at which the next caches arrive, or infinity if no cache is being sent."""
        ready = self.ready
        while ready and ready[0][1] != ready[0][2].number:  # a later prompt has delayed this batch
            heapreplace(ready, (ready[0][2].done, ready[0][2].number, ready[0][2]))
        return ready[0][0] if ready else inf

    def _ready_time(self) -> float:
        return self._next_done() + self.request

    def _receive(self) -> None:
        self._arrive()
        known = self._known_time()
        while self._ready_time() <= known:
            batch = heappop(self.ready)[2]
            self.queue.extend(batch.members)
            self.next += len(batch.members)
            batch.members = []

    def _prompts(self) -> bool:
        """Give slots to requests whose caches have arrived. Return False, because no prompts are computed here."""
        if not self._has_room():
            return False
        while self.queue and self._admit():
            request = self.partial.popleft()
            if request.made:  # the request lost its cache, so this instance computes its prompt again
                tokens = float(request.prompt + request.made)
                self._pause(self.price.mixed(0, tokens, tokens, 0.5 * tokens**2, 1))
            if self.reserve:
                self.promised -= min(request.output, self.reserved)
            self._join(request)
            if request.first < 0:
                running = self.running
                read = self.price.cached(running) * (self.offset + running * self.step)
                request.first = self.now + self.price.decode(running) + read
        return False
