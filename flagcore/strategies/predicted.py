"""The fastest predicted candidate first."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy


class Predicted:
    """Tries candidates in the order of their predicted step time, unknown ones last, equal ones by memory."""

    name = "predicted"

    def next(self, context: SearchContext) -> Choice:
        rows = context.open_rows
        time = np.nan_to_num(context.predictions.step_time_s[rows], nan=np.inf)
        first = np.lexsort((context.predictions.device_used_bytes[rows], time))[0]
        return Choice(row=int(rows[first]), because="the fastest predicted candidate")


STRATEGY: Strategy = Predicted()
