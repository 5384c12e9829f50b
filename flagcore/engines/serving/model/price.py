"""Seconds of iterations of one candidate as plain numbers: what a simulation asks millions of times."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

from flagcore.engines.serving.model.iteration import NODES, IterationCosts
from flagcore.engines.serving.model.work import Overheads

GRID: list[float] = NODES.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one lane of one candidate may do: tokens of an iteration, sequences, cached tokens, all ranks together.

    `ranks` share attention. Each of its `stages` works on another batch, and all wait for the slowest: an iteration is
    what brings each sequence one token. `shared_prefix` tokens of each prompt are cached before it comes.
    """

    budget: float
    running: float
    cache_tokens: float
    block: float = 16.0
    ranks: float = 1.0
    stages: float = 1.0
    shared_prefix: float = 0.0


class Price:
    """The costs of one candidate (a row of `costs`) on its lane, with the engine's overheads."""

    def __init__(self, costs: IterationCosts, row: int, lane: Lane, over: Overheads) -> None:
        self.lane, self.over = lane, over
        self.pair, self._cached = float(costs.pair[row]), float(costs.cached[row])
        self._parts = lane.ranks * lane.stages
        self._local, self._shared = costs.local[row].tolist(), costs.shared[row].tolist()
        self._sampled = costs.sampled[row].tolist()
        self._fixed, self._sequence = float(costs.fixed[row]), float(costs.sequence[row])
        self._floor, self._captured = float(costs.floor[row]), float(costs.captured[row])
        self._decode: dict[int, float] = {}

    def cached(self, sequences: int) -> float:
        """Return the time for each cached token of all `sequences`: ranks and stages share it as evenly as possible."""
        return self._cached / min(self._parts, max(sequences, 1))

    def decode(self, sequences: int) -> float:
        """Return the time of an iteration of `sequences` that decode, without reading their context."""
        found = self._decode.get(sequences)
        if found is None:
            batch = sequences / self.lane.stages
            here = batch / self.lane.ranks
            found = _at(self._local, here) + _at(self._sampled, here) + _at(self._shared, batch)
            if batch > self._captured:
                found = max(found, self._floor)
            found += self._fixed + self._sequence * sequences
            self._decode[sequences] = found
        return found

    def mixed(self, sequences: int, tokens: float, longest: float, pairs: float, ended: int) -> float:
        """Return the time of an iteration of `tokens` of prompts and `sequences` that decode, without their context.

        `longest` is the largest piece of one prompt, `pairs` the queries times keys, `ended` the prompts that end. With
        several ranks or batches the slowest decides: each has an even share of the tokens, or the longest piece.
        """
        stages, ranks = self.lane.stages, self.lane.ranks * self.lane.stages
        here, batch = max(tokens / ranks, longest), sequences / stages + max(tokens / stages, longest)
        time = _at(self._local, sequences / ranks + here) + self.pair * pairs * (here / tokens)
        time += _at(self._shared, batch) + _at(self._sampled, (sequences + ended) / ranks)
        if batch > self._captured or not self.over.mixes:
            time = max(time, self._floor)
        return time + self._fixed + self._sequence * sequences

    def pieces(self, sequences: int, tokens: float, pairs: float, count: int) -> float:
        """Return the time of `count` iterations of `tokens` each of one long prompt while `sequences` decode.

        `pairs` are those of the first; each has `tokens` squared more than the one before.
        """
        first, most = (self.mixed(sequences, tokens, tokens, pairs + each * tokens**2, 0) for each in (0, count - 1))
        more = self.pair * tokens**2
        if count < 3 or more <= 0.0:
            return 0.5 * count * (first + most)
        waits = max(0, ceil(count - 1 - (most - first) / more - 1e-6))  # in so many the host is slower
        rest = count - waits
        return waits * first + rest * most - more * (rest * (rest - 1) / 2.0)


def _at(table: list[float], tokens: float) -> float:
    if tokens <= 1.0:
        return table[0] if tokens > 0.0 else 0.0
    place = min(bisect_right(GRID, tokens), len(GRID) - 1)
    low, high = GRID[place - 1], GRID[place]
    return table[place - 1] + (tokens - low) / (high - low) * (table[place] - table[place - 1])
