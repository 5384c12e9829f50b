"""V-Half and V-Min: one pattern again for each micro-batch, pushed together where a step begins and ends.

Tables say what a device does in which unit of time, as the pattern is drawn: each pass takes one unit. Symbols as in
`flagcore.physics.schedules.orders`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TypeAlias

from flagcore.physics.schedules.execution import Orders, Pass

Table: TypeAlias = dict[int, Pass]
"""What one device does, by the unit of time."""


def v_tables(p: int, m: int, *, half: bool) -> list[Table]:
    """Return V-Half or V-Min (arXiv 2405.15362): a pattern in six units of time, again for each micro-batch, W between.

    The paper moves the pattern's second half back by some units where passes of two micro-batches would fall together.
    """
    tables = []
    for r in range(p):
        if half:
            gap = 3 if p % 2 == 0 else 0
            times = (2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2)
        else:
            gap = 2 if p % 3 == 0 else 0
            times = (r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1)
        parts = (("F", r), ("F", 2 * p - 1 - r), ("B", 2 * p - 1 - r), ("B", r))
        table: Table = {t + 6 * i: (*parts[k], i) for k, t in enumerate(times) for i in range(m)}
        waiting: list[Pass] = []
        for t in range(max(table) + 2 * m + 1):
            if t in table:
                waiting += [("W", *table[t][1:])] * (table[t][0] == "B")
            elif waiting:
                table[t] = waiting.pop(0)
        tables.append(table)
    return tables


def compacted(tables: list[Table], m: int) -> list[Table]:
    """Return the tables with the passes of a step's start and end moved into earlier units that are free.

    A pass stays behind its input, and behind that of the micro-batch before it; a device never holds more than the
    most that any held before. The start goes as far as the first micro-batch's last backward, the end begins at the
    last micro-batch's last forward through the devices in order.
    """
    tables = [dict(table) for table in tables]
    p, units = len(tables), max(max(table) for table in tables) + 1
    held = [list(accumulate(_grown(table[t][0]) if t in table else 0 for t in range(units))) for table in tables]
    most = max(max(each) for each in held)
    when = {one: t for table in tables for t, one in table.items()}
    steady = (when["B", 0, 0], max(when["F", part, m - 1] for part in range(p)))
    for t, device, one in sorted((t, device, one) for device, table in enumerate(tables) for t, one in table.items()):
        if steady[0] <= t <= steady[1]:
            continue
        kind, part, batch = one
        first = max(when.get(_input(one, 2 * p), -1), when.get((kind, part, batch - 1), -1)) + 1
        for earlier in range(first, t):
            grown = _grown(kind)
            if earlier in tables[device] or (grown > 0 and max(held[device][earlier:t]) + grown > most):
                continue
            for unit in range(earlier, t):
                held[device][unit] += grown
            tables[device][earlier] = tables[device].pop(t)
            when[one] = earlier
            break
    return tables


def orders_of_tables(tables: list[Table]) -> Orders:
    """Return what each device does, in order."""
    return [[(table[t],) for t in sorted(table)] for table in tables]


def _grown(kind: str) -> int:
    """Return how many parts of a micro-batch's activations a device holds more after a pass, as the pattern counts."""
    return {"F": 1, "W": -1}.get(kind, 0)


def _input(one: Pass, parts: int) -> Pass:
    """Return the pass that gives a pass its input; one that does not exist for the first forward."""
    kind, part, batch = one
    if kind == "F":
        return "F", part - 1, batch
    if kind == "W":
        return "B", part, batch
    return ("B", part + 1, batch) if part < parts - 1 else ("F", part, batch)
