"""The requests of a simulation, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field


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
