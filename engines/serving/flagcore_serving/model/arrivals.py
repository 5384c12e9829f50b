"""The requests of a simulation, from the time at which a client sends them until the scheduler receives them."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from flagcore_serving.model.price import Price
from flagcore_serving.model.sequences import Request, Sequences, SimulatedRun
from flagcore_serving.model.vision import ImageWork


class Arrivals(Sequences):
    """Sends the requests of a simulation through its front end. `Simulation` describes the parameters.

    - `sent`: requests that were sent. `coming`: those whose images are being encoded by other instances, and when they
      are ready. `entered`: those that reached the front end, of which the scheduler has received `next`.
    """

    __slots__ = (
        *("open", "think_s", "requests", "outcome", "gaps", "longest", "apart", "coming", "entered", "next", "sent"),
        *("parse_ends", "group_arrival", "tokenized", "encoded", "ready_s"),
    )

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
        super().__init__(price)
        self.think_s, self.open = think_s, arrivals is not None
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
        self.apart: list[tuple[float, float, float]] = []
        self._add_images(price, images)
        self.coming, self.entered, self.parse_ends = list[tuple[float, int]](), list[Request](), list[float]()
        self.outcome = SimulatedRun(self.requests)
        self.gaps, self.longest = self.outcome.gaps, max((request.output for request in self.requests), default=0)
        self.tokenized = self.encoded = 0.0
        self.ready_s = self.group_arrival = -1.0  # unknown
        self.next, self.sent = 0, len(times)
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
        ends = self.parse_ends
        if not ends or arrival != self.group_arrival:
            ends.append(max(ends[-1] if ends else 0.0, arrival))
            self.group_arrival = arrival
        ends[-1] += self.entry
        request.group = len(ends) - 1
        self.ready_s = -1.0

    def _tokenized_time(self) -> float:
        """Return the time at which the next request is tokenized. One thread tokenizes all requests in order."""
        request = self.entered[self.next]
        free = max(self.parse_ends[request.group], self.tokenized)
        return free + self.prompt_token * request.prompt + request.read

    def _ready_time(self) -> float:
        if self.ready_s < 0.0:
            is_there = self.next < len(self.entered)
            self.ready_s = self._tokenized_time() + self.request if is_there else inf
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
