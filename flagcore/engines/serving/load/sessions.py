"""Divides the requests of sessions into conversations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flagcore.domain.space import FloatArray, IntArray

MAX_DELAY_S = 86_400.0
"""Maximum seconds before a turn, as in a spec."""


def conversations(
    sessions: Sequence[str], lengths: IntArray, times: FloatArray, elapsed: Sequence[float], turns: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the requests in the order of conversations with at most `turns`, and `follows` and `think_s` of Traffic.

    The requests have the names of their `sessions` (empty: none), the `lengths` of their prompts, and the seconds when
    they were sent, in ascending order, and until their answers. A request continues the one before if its prompt is
    longer and follows within a day; else it starts a conversation.
    """
    found, latest, think_s = list[list[int]](), dict[str, list[int]](), np.zeros(len(sessions))
    for index, session in enumerate(sessions):
        past = latest.get(session, []) if session else []
        wait = times[index] - times[past[-1]] - elapsed[past[-1]] if past else math.inf
        if wait <= MAX_DELAY_S and len(past) < turns and lengths[index] > lengths[past[-1]]:
            past.append(index)
            think_s[index] = max(wait, 0.0)
        else:
            latest[session] = [index]
            found.append(latest[session])
    order = np.array([index for each in found for index in each], dtype=np.int64)
    is_first = np.array([place == 0 for each in found for place in range(len(each))], dtype=np.bool_)
    return order, np.where(is_first, -1, np.arange(order.size) - 1), think_s[order]
