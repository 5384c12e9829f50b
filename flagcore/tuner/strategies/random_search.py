"""Random search, the reference for all other strategies."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy


class Random:
    """Chooses open candidates uniformly. The seed is the number of trials, so a resumed run makes the same choices."""

    name = "random"

    def next(self, context: SearchContext) -> Choice:
        row = np.random.default_rng(len(context.trials) + len(context.pending)).choice(context.open_rows)
        return Choice(row=int(row), because="chosen at random")


STRATEGY: Strategy = Random()
