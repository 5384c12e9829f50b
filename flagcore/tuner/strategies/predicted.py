"""Tries candidates in the order of their predicted step times."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy


class Predicted:
    """Tries the candidate with the fastest prediction first. Ties are broken by memory; unknown times come last."""

    name = "predicted"

    def next(self, context: SearchContext) -> Choice:
        rows = context.open_rows
        time = np.nan_to_num(context.predictions.step_time_s[rows], nan=np.inf)
        first = np.lexsort((context.predictions.device_used_bytes[rows], time))[0]
        return Choice(row=int(rows[first]), because="the fastest predicted candidate")


STRATEGY: Strategy = Predicted()
