"""Any open candidate: what a search has to beat."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy


class Random:
    """Picks among the open candidates with equal chances; the same ones when a run is resumed."""

    name = "random"

    def next(self, context: SearchContext) -> Choice:
        row = np.random.default_rng(len(context.trials)).choice(context.open_rows)
        return Choice(row=int(row), because="drawn by chance")


STRATEGY: Strategy = Random()
