"""Search strategies, which choose the order of trials.

This module contains the strategies that do not learn: the order of predictions, and random search, to which all others
are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy


@dataclass(slots=True)
class Simple:
    """A strategy that tries the row that `choose` returns, and always gives the same reason."""

    name: str
    because: str
    choose: Callable[[SearchContext], np.int64]

    def next(self, context: SearchContext) -> Choice:
        return Choice(row=int(self.choose(context)), because=self.because)


def _fastest(context: SearchContext) -> np.int64:
    """Return the row with the fastest prediction. Ties are broken by memory. Unknown times come last."""
    rows = context.open_rows
    time = np.nan_to_num(context.predictions.step_time_s[rows], nan=np.inf)
    return rows[np.lexsort((context.predictions.device_used_bytes[rows], time))[0]]  # type: ignore[no-any-return]


def _any(context: SearchContext) -> np.int64:
    """Return a random untried row. The seed is the number of trials, so that a resumed run makes the same choices."""
    generator = np.random.default_rng(len(context.trials) + len(context.pending))
    return generator.choice(context.open_rows)  # type: ignore[no-any-return]


PREDICTED: Strategy = Simple("predicted", "the fastest predicted candidate", _fastest)
RANDOM: Strategy = Simple("random", "chosen at random", _any)
