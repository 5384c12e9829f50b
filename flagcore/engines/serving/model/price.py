"""Seconds of iterations of one candidate as plain Python numbers, for millions of calls by the simulation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from flagcore.engines.serving.model.iteration import NODES, IterationCosts
from flagcore.engines.serving.model.vision import ImageWork
from flagcore.engines.serving.model.work import Overheads

GRID: list[float] = NODES.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Limits of one lane of one candidate: tokens of an iteration, sequences and cached tokens over all ranks.

    `ranks` is the number of attention DP ranks. Each of the `stages` works on another batch and waits for the slowest:
    an iteration is the time in which each sequence gets one token. The first `shared_prefix` tokens of each prompt are
    cached; a prefix cache keeps `retained` tokens of other prompts, in blocks of `page` tokens. With `drafted` tokens
    per sequence, an iteration of decoding sequences only gives each `gain` tokens.
    """

    budget: float
    running: float
    cache_tokens: float
    block: float = 16.0
    ranks: float = 1.0
    stages: float = 1.0
    shared_prefix: float = 0.0
    retained: float = 0.0
    page: float = 1.0
    drafted: float = 0.0
    gain: float = 1.0


class Price:
    """The iteration times of one candidate (a row of `costs`) on its lane, with the engine's overheads.

    `encoding` returns the seconds of the vision tower for the images of each request.
    """

    def __init__(
        self,
        costs: IterationCosts,
        row: int,
        lane: Lane,
        overheads: Overheads,
        encoding: Callable[[Sequence[ImageWork]], list[float]] = lambda images: [],
    ) -> None:
        self.encoding = encoding
        self.lane, self.overheads = lane, overheads.slowed(float(costs.crowding[row]))
        self.pair, self._cached = float(costs.pair[row]), float(costs.cached[row])
        self._parts = lane.ranks * lane.stages
        self._local, self._shared = costs.local[row].tolist(), costs.shared[row].tolist()
        self._sampled = costs.sampled[row].tolist()
        self._fixed, self._sequence = float(costs.fixed[row]), float(costs.sequence[row])
        self._floor, self._captured = float(costs.floor[row]), float(costs.captured[row])
        self._decode: dict[int, float] = {}

    def cached(self, sequences: int) -> float:
        """Return the seconds per cached token of `sequences`, which are spread evenly over ranks and stages."""
        return self._cached / (min(self._parts, max(sequences, 1)) * self.lane.gain)

    def decode(self, sequences: int) -> float:
        """Return the seconds per token of iterations that decode `sequences`, without reading their context."""
        seconds = self._decode.get(sequences)
        if seconds is None:
            batch = sequences * (1.0 + self.lane.drafted) / self.lane.stages
            per_rank = batch / self.lane.ranks
            seconds = (
                _interpolate(self._local, per_rank)
                + _interpolate(self._sampled, per_rank)
                + _interpolate(self._shared, batch)
            )
            if batch > self._captured:
                seconds = max(seconds, self._floor)
            seconds = (seconds + (self._fixed + self._sequence * sequences)) / self.lane.gain
            self._decode[sequences] = seconds
        return seconds

    def mixed(
        self, sequences: int, tokens: float, longest: float, pairs: float, ended: int, encode: float = 0.0
    ) -> float:
        """Return the seconds of an iteration of `tokens` prompt tokens and `sequences` decoding sequences.

        The time to read the context of the sequences is not included. `longest` is the largest piece of one prompt,
        `pairs` the number of query-key pairs, `ended` the number of prompts that end, `encode` the seconds of the
        vision tower for their images. The slowest rank or batch has an even share of the tokens, or the longest piece.
        """
        stages, ranks = self.lane.stages, self.lane.ranks * self.lane.stages
        per_rank, batch = max(tokens / ranks, longest), sequences / stages + max(tokens / stages, longest)
        time = _interpolate(self._local, sequences / ranks + per_rank) + self.pair * pairs * (per_rank / tokens)
        time += _interpolate(self._shared, batch) + _interpolate(self._sampled, (sequences + ended) / ranks)
        if batch > self._captured or not self.overheads.mixes:
            time = max(time, self._floor)
        return time + encode * (per_rank / tokens) + self._fixed + self._sequence * sequences

    def pieces(self, sequences: int, tokens: float, pairs: float, count: int) -> float:
        """Return the seconds of `count` iterations of `tokens` tokens of one long prompt while `sequences` decode.

        `pairs` are the query-key pairs of the first iteration; each iteration adds `tokens` squared.
        """
        first, last = (self.mixed(sequences, tokens, tokens, pairs + each * tokens**2, 0) for each in (0, count - 1))
        growth = self.pair * tokens**2
        if count < 3 or growth <= 0.0:
            return 0.5 * count * (first + last)
        host_bound = max(0, ceil(count - 1 - (last - first) / growth - 1e-6))  # iterations bound by the host
        remaining = count - host_bound
        return host_bound * first + remaining * last - growth * (remaining * (remaining - 1) / 2.0)


def tokens_per_iteration(acceptance: float, drafted: float) -> float:
    """Return the expected tokens of a sequence in one iteration if each of `drafted` tokens is accepted with the
    probability `acceptance` once those before it are (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
    """
    return drafted + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (drafted + 1.0)) / (1.0 - acceptance)


def _interpolate(table: list[float], tokens: float) -> float:
    if tokens <= 1.0:
        return table[0] if tokens > 0.0 else 0.0
    index = min(bisect_right(GRID, tokens), len(GRID) - 1)
    low, high = GRID[index - 1], GRID[index]
    return table[index - 1] + (tokens - low) / (high - low) * (table[index] - table[index - 1])
