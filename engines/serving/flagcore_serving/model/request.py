"""The requests of a simulation, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Request:
    """One request: lengths in tokens, and times in seconds.

    - `hit`: tokens at the start of the prompt that the prefix cache has.
    - `load`: seconds to load those of them that are not on the devices.
    - `read`, `encode`: seconds that its images take in the front end and in the vision tower.
    - `adapter`: the adapter that it uses; -1 if it needs no slot.
    - `parts`: the parts of its prompt that other requests have, too, with their tokens, `shared` in total.
    - `first`, `end`: times of the first and the last token; -1 if there is none yet.

    The fields from `done` on are internal to the simulation.
    """

    arrival: float
    prompt: int
    output: int
    hit: float = 0.0
    load: float = 0.0
    read: float = 0.0
    encode: float = 0.0
    adapter: int = -1
    first: float = -1.0
    end: float = -1.0
    parts: Sequence[tuple[int, int]] = ()
    shared: int = 0
    done: float = 0.0
    made: int = 0
    loaded: float = 0.0
    kept: float = 0.0
    since: int = 0
    context: int = 0
    ticket: int = 0
    group: int = 0

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
