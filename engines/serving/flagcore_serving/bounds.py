"""Which combinations of a large space are kept while it is built: the best ones by the closed form of their load."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import numpy as np

from flagcore.contracts import Bounds, Costs
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import Message
from flagcore_serving.model.candidates import SIMULATION

KEPT = 2048
"""The combinations that are kept of each piece of a large space (`flagcore.tuner.stages.build.CHUNK`). A choice."""
LARGE = 1 << 17
"""Spaces with more partial candidates are cut. Those with fewer are predicted in 20 s and 1 GiB."""
MOST = 1 << 19
"""A space that needs more estimates than this while it is built, about 15 s, is refused."""
SAMPLE, VALUES = 256, 16
"""The most combinations with which the best values of knobs are found that are not crossed yet, and the most values
that are compared."""


class ServingBounds(Bounds):
    """Bounds of servers: the time and the memory of a candidate in the steady state of its load.

    `predict`, `rules_of`: those of the engine, predictions in closed form. `layout`: the names of its knobs for
    layouts.
    """

    knobs: tuple[str, ...] = ()

    def __init__(
        self,
        predict: Callable[[Task, Columns, Costs], Predictions],
        rules_of: Callable[[Task], Sequence[Rule]],
        layout: Sequence[str],
    ) -> None:
        self.predict, self.rules_of, self.layout = predict, rules_of, layout

    def seconds(self, task: Task, columns: Columns, costs: Costs) -> FloatArray:
        return self.predict(task, columns, costs).step_time_s

    def share(self, task: Task, columns: Columns, costs: Costs) -> FloatArray:
        return self.predict(task, columns, costs).share_in_use

    def rules(self, task: Task, axes: Sequence[Axis], costs: Costs) -> tuple[Rule, ...]:
        """Return a rule for each knob that is crossed after the layout. They keep the best combinations of those so
        far. Before, there are many layouts that other rules remove or merge."""
        rules = cache(partial(self.rules_of, task))  # few spaces are large enough to need them
        best = Best(lambda columns: self.predict(task, columns, costs), rules, self.layout, axes, task.spec.work.slo)
        names = [axis.knob for axis in axes]
        first = max((place for place, name in enumerate(names, 1) if name in self.layout), default=1)
        return tuple(
            Rule(
                name="beyond_the_best",
                knobs=tuple(names[:count]),
                message=Message(
                    "the space is large, and by a quick estimate this is not among its {kept:,} best", kept=KEPT
                ),
                broken=best.excludes,
                least_rows=LARGE,
                most_rows=MOST,
            )
            for count in range(first, len(names) + 1)
        )


class Best:
    """The best combinations of a space, with the best known values for knobs that are not crossed yet.

    - `has_excluded`: whether combinations were excluded. A single candidate is then one that was not kept.
    """

    def __init__(
        self,
        predict: Callable[[Columns], Predictions],
        rules: Callable[[], Sequence[Rule]],
        layout: Sequence[str],
        axes: Sequence[Axis],
        limits: Mapping[str, float],
    ) -> None:
        self.axes, self.limits, self.has_excluded = axes, limits, False
        self._predict, self._rules, self._layout, self._values = predict, rules, layout, dict[str, int]()

    def excludes(self, columns: Columns) -> BoolArray:
        """Return which combinations are not among the KEPT best. In turns, these are the fastest ones, the fastest ones
        of each layout and, if there are limits, those nearest to them. Combinations that do not fit or are not legal,
        and copies, with the same simulation as one with less memory, come last."""
        size = next(iter(columns.values())).size
        if size <= KEPT:
            return np.full(size, self.has_excluded and size == 1)
        predictions, lacks = self._completed(columns)
        late, used = self._excess(predictions), predictions.device_used_bytes
        rank = _places(np.zeros(size), np.nan_to_num(predictions.step_time_s, nan=np.inf), late > 1.0)
        copies = _places(predictions.figures[SIMULATION], used)
        layouts = np.stack([columns[knob] for knob in self._layout if knob in columns])
        layout = np.unique(layouts, axis=1, return_inverse=True)[1].reshape(-1)
        orders: list[tuple[IntArray | FloatArray | BoolArray, ...]] = [
            (rank, copies, lacks),
            (rank, _places(layout, rank, copies), lacks),
        ]
        orders += [(rank, late, copies, lacks)] if self.limits else []
        rows = np.stack([np.lexsort(keys) for keys in orders], axis=1).ravel()
        first = np.sort(np.unique(rows, return_index=True)[1])
        result = np.ones(size, dtype=np.bool_)
        result[rows[first[:KEPT]]] = False
        self.has_excluded = True
        return result

    def _completed(self, columns: Columns) -> tuple[Predictions, BoolArray]:
        """Return the predictions of combinations, completed with the best known values of the other knobs, and which of
        them do not fit or are not legal."""
        size = next(iter(columns.values())).size
        if not self._values:
            self._find(columns)
        whole = {name: np.full(size, code) for name, code in self._values.items()} | dict(columns)
        predictions = self._predict(whole)
        broken = [rule.broken(whole) for rule in self._rules() if set(rule.knobs) <= whole.keys()]
        return predictions, np.any([~predictions.fits, *broken], axis=0)

    def _find(self, columns: Columns) -> None:
        """Find the best values of the knobs that `columns` does not have: one knob after the other, with the mean of
        the logarithms of the times of a sample. Those that do not fit, are not legal or too late count as slower."""
        size = next(iter(columns.values())).size
        rows: IntArray = np.unique(np.linspace(0, size - 1, SAMPLE).astype(np.int64))
        sample = {name: column[rows] for name, column in columns.items()}
        others = [axis for axis in self.axes if axis.knob not in columns]
        self._values = {axis.knob: axis.encode(axis.values[0]) for axis in self.axes}

        def score(knob: str, code: int) -> float:
            predictions, lacks = self._completed(sample | {knob: np.full(rows.size, code)})
            seconds = predictions.step_time_s * np.maximum(self._excess(predictions), 1.0)
            return float(np.nansum(np.log(seconds) + 2.0 * lacks))

        for axis in others:
            codes = [axis.encode(value) for value in axis.values[:VALUES]]
            self._values[axis.knob] = min(codes, key=partial(score, axis.knob)) if len(codes) > 1 else codes[0]

    def _excess(self, predictions: Predictions) -> FloatArray:
        """Return the largest ratio of a mean latency to a limit of it."""
        figures = predictions.figures
        ratios = [figures[name] / limit for name, limit in self.limits.items() if name in figures]
        none: FloatArray = np.zeros(predictions.step_time_s.shape)
        excess: FloatArray = np.maximum.reduce([none, *ratios])
        return excess


def _places(group: IntArray | FloatArray, *keys: FloatArray | IntArray | BoolArray) -> IntArray:
    """Return the place of each element among those of its group, sorted by `keys`, the last one first."""
    order, places, counts = np.lexsort((*keys, group)), np.empty(group.size, dtype=np.int64), np.arange(group.size)
    is_first = np.append(True, np.diff(group[order]) != 0)
    places[order] = counts - np.maximum.accumulate(np.where(is_first, counts, 0))
    return places
