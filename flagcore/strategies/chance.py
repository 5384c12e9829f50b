"""Random search, the baseline of all other strategies."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy


class Random:
    """Draws open candidates uniformly. A resumed run draws the same ones."""

    name = "random"

    def next(self, context: SearchContext) -> Choice:
        row = np.random.default_rng(len(context.trials) + len(context.pending)).choice(context.open_rows)
        return Choice(row=int(row), because="drawn at random")


STRATEGY: Strategy = Random()
