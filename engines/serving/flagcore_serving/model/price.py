"""The time of an iteration of a candidate's lane, in plain Python numbers, because a simulation needs millions."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Final

from flagcore_serving.model.iteration import NODES, IterationCosts
from flagcore_serving.model.tiers import Tier
from flagcore_serving.model.vision import Encoders, ImageWork
from flagcore_serving.model.work import Overheads

GRID: Final[list[float]] = NODES.tolist()
LAST: Final = len(GRID) - 1
UNLIMITED_TOKENS = 1e15
"""Size of an unlimited cache in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Limits of one lane of one candidate. A lane is one instance with its share of the load.

    - `budget`: maximum tokens of a batch. `running`: maximum sequences. Both are in total over all ranks.
      `group`: those of one group, with pipeline stages.
    - `cache_tokens`: the capacity of the cache in tokens, in total over all ranks.
    - `block`: tokens of one block of the cache. `fixed`: tokens that a sequence takes beside its own, for its states.
      `admits`: tokens that must also be free for it to be admitted. `chunk`: tokens of which pieces of a prompt, but
      its last, are a multiple; 0 if they may be any number.
    - `ranks`: the number of attention DP ranks.
    - `stages`: the number of pipeline stages, each of which works on another batch. The time of an iteration is that in
      which a batch passes all stages.
    - `shared_prefix`: the first tokens of each prompt, which are always cached.
    - `retained`: tokens of other prompts that the prefix cache of the devices can hold, in blocks of `page` tokens.
    - `finds`: whether a preempted sequence finds its blocks in the cache again that others have not taken.
    - `tiers`: the tiers of the prefix cache behind the devices.
    - `whole_prompts`: as in `Overheads`.
    - `adapters`: adapters that one iteration can use; 0: all. `swap_s`: seconds to load another one into a slot.
    - `mixes`: whether iterations combine prompts and decoding.
    - `drafted`, `gain`: tokens that speculation drafts per sequence, and tokens that a sequence gets, in an iteration
      that only decodes.
    - `event`: as in `Overheads`; 0 for a kind of instance. `context`: the mean tokens of a sequence that decodes.
    - `ahead`: batches that the scheduler plans ahead while the one before is computed (asynchronous scheduling).
    """

    budget: float
    running: float
    cache_tokens: float
    group: float = inf
    block: float = 16.0
    fixed: float = 0.0
    admits: float = 0.0
    chunk: float = 0.0
    ranks: float = 1.0
    stages: float = 1.0
    shared_prefix: float = 0.0
    retained: float = 0.0
    page: float = 1.0
    finds: bool = False
    tiers: tuple[Tier, ...] = ()
    whole_prompts: bool = False
    adapters: float = 0.0
    swap_s: float = 0.0
    mixes: bool = True
    drafted: float = 0.0
    gain: float = 1.0
    ahead: float = 0.0
    event: float = 0.0
    context: float = 0.0


class Price:
    """The iteration times of one candidate on its lane, with the engine's overheads.

    `row`: the row of the candidate in `costs`. `encoding`: a function that returns the seconds of the vision tower for
    the images of each request. `encoders`: the instances that encode them instead. `simulation`: the class that
    simulates the lane in place of `Simulation`.

    The limits with which its simulations are the same: `needed`: the least `Lane.running`; `widest`: the least
    `Lane.budget`, and `filled`: the least `Lane.cache_tokens`, unless the limit itself is less; `below`, `above`:
    `captured` is at least `below`, and less than `above`.
    """

    __slots__ = (
        *("simulation", "encoding", "encoders", "needed", "below", "above", "filled", "widest", "lane", "overheads"),
        *("pair", "_drafted", "_cached", "_each", "_ranks", "_gain", "_mixes", "_local", "_shared", "_sampled"),
        *("_drafts", "_draft_heads", "_prompts", "_fixed", "_sequence", "_floor", "_captured", "_decode_floor"),
        *("_mixed_floor", "_decode"),
    )

    def __init__(
        self,
        costs: IterationCosts,
        row: int,
        lane: Lane,
        overheads: Overheads,
        encoding: Callable[[Sequence[ImageWork]], list[float]] = lambda images: [],
        encoders: Encoders | None = None,
        simulation: Any = None,
    ) -> None:
        self.simulation = simulation
        self.encoding, self.encoders, self.needed = encoding, encoders, 0.0
        self.below, self.above, self.filled, self.widest = 0.0, inf, 0.0, inf if lane.chunk else 0.0
        slowed = overheads.slowed(float(costs.crowding[row]))
        self.lane = lane
        self.overheads = replace(slowed, entry=slowed.entry / (lane.ranks if slowed.own_front_ends else 1.0))
        self.pair, self._drafted = float(costs.pair[row]), lane.drafted
        self._cached = float(costs.cached[row] + lane.drafted * costs.draft_cached[row])
        self._ranks, self._gain, self._mixes = lane.ranks, lane.gain, slowed.mixes
        self._each = self._cached / (min(lane.ranks, 1.0) * lane.gain)
        self._local, self._shared = costs.local[row].tolist(), costs.shared[row].tolist()
        self._sampled = costs.sampled[row].tolist()
        self._drafts, self._draft_heads = costs.drafts[row].tolist(), costs.draft_heads[row].tolist()
        self._prompts = (costs.shared[row] + costs.summed[row]).tolist()
        self._fixed, self._sequence = float(costs.fixed[row]), float(costs.sequence[row]) * lane.stages
        self._floor, self._captured = float(costs.floor[row]), float(costs.captured[row])
        self._decode_floor, self._mixed_floor = float(costs.decode_floor[row]), float(costs.mixed_floor[row])
        self._decode: dict[int, float] = {}

    def cached(self, sequences: int) -> float:
        """Return the seconds to read one cached token for `sequences` sequences spread evenly over ranks."""
        if sequences <= 1 or self._ranks <= 1.0:
            return self._each
        return self._cached / (min(self._ranks, sequences) * self._gain)

    def decode(self, sequences: int) -> float:
        """Return the seconds in which each of `sequences` sequences gets a token, without reading their context."""
        seconds = self._decode.get(sequences)
        if seconds is None:
            batch = sequences * (1.0 + self.lane.drafted)
            per_rank = batch / self.lane.ranks
            seconds = (
                _interpolate(self._local, per_rank)
                + _interpolate(self._sampled, per_rank)
                + _interpolate(self._shared, batch)
            )
            if seconds < self._floor or seconds < self._decode_floor:
                seconds = max(seconds, self._floor if self._exceeds(per_rank) else self._decode_floor)
            if self._drafted:
                seconds += self._drafting(sequences)
            seconds = (seconds + (self._fixed + self._sequence * sequences / self.lane.ranks)) / self.lane.gain
            seconds = max(seconds, sequences * (self.lane.event - self.cached(sequences) * self.lane.context))
            self._decode[sequences] = seconds
        return seconds

    def _drafting(self, sequences: int) -> float:
        rows = sequences / self._ranks
        return self._drafted * (_interpolate(self._drafts, rows) + _interpolate(self._draft_heads, rows))

    def mixed(
        self, sequences: int, tokens: float, longest: float, pairs: float, ended: int, encode: float = 0.0
    ) -> float:
        """Return the time of an iteration with `tokens` prompt tokens and `sequences` decoding sequences, in seconds.

        The time to read the context of the sequences is not included.

        - `sequences`: with speculation, each computes its drafted tokens, too.
        - `longest`: tokens of the longest prompt chunk.
        - `pairs`: the number of query-key pairs.
        - `ended`: the number of prompts that this iteration completes.
        - `encode`: seconds that the vision tower takes for the images of the prompts.

        The time depends on the slowest rank. It is assumed to compute an even share of the tokens, or the longest chunk
        if that is more.
        """
        ranks, decoding = self._ranks, sequences * (1.0 + self.lane.drafted)
        widest = decoding + max(tokens, longest * ranks) + 1.0  # an iteration that is not full admits a further request
        if widest > self.widest:
            self.widest = widest
        per_rank, batch = max(tokens / ranks, longest), decoding + max(tokens, longest)
        time = _interpolate(self._local, decoding / ranks + per_rank) + self.pair * pairs * (per_rank / tokens)
        time += _interpolate(self._prompts, batch) + _interpolate(self._sampled, (decoding + ended) / ranks)
        if time < self._floor or time < self._mixed_floor:
            is_eager = not self._mixes or self._exceeds(batch / ranks)
            time = max(time, self._floor if is_eager else self._mixed_floor)
        if self._drafted:
            time += _interpolate(self._drafts, per_rank) + self._drafting(sequences)
        return time + encode * (per_rank / tokens) + self._fixed + self._sequence * sequences / ranks

    def _exceeds(self, tokens: float) -> bool:
        """Return whether an iteration of `tokens` tokens of an attention rank is too large for a graph."""
        if tokens > self._captured:
            self.above = min(self.above, tokens)
            return True
        self.below = max(self.below, tokens)
        return False

    def pieces(self, sequences: int, tokens: float, pairs: float, count: int, prompts: float = 1.0) -> float:
        """Return the time of `count` iterations in seconds, each of which computes `tokens` tokens of long prompts, one
        on each of `prompts` attention DP ranks.

        `sequences`: sequences that decode at the same time. `pairs`: query-key pairs of the first iteration; in each
        further one, each prompt has the square of its tokens more.
        """
        piece = tokens / prompts
        first, last = (
            self.mixed(sequences, tokens, piece, pairs + each * prompts * piece**2, 0) for each in (0, count - 1)
        )
        growth = self.pair * piece**2
        if count < 3 or growth <= 0.0:
            return 0.5 * count * (first + last)
        host_bound = max(0, ceil(count - 1 - (last - first) / growth - 1e-6))  # iterations that wait for the host
        remaining = count - host_bound
        return host_bound * first + remaining * last - growth * (remaining * (remaining - 1) / 2.0)


def _interpolate(table: list[float], tokens: float) -> float:
    if tokens <= 1.0:
        return table[0] if tokens > 0.0 else 0.0
    index = bisect_right(GRID, tokens, 1, LAST)
    low, value = GRID[index - 1], table[index - 1]
    return value + (tokens - low) / (GRID[index] - low) * (table[index] - value)
