"""The wall-clock of searches that run several trials at once, against the same search one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from searchers import by_strategy
from sweeps import Sweep

from flagcore import plugins


def print_at_once(names: Sequence[str], sweeps: Sequence[Sweep], numbers: Sequence[int], every: int) -> dict[str, Any]:
    """Print a table with a line for each strategy and number of trials at once, and return its figures.

    Wall-clock is from the baseline to the end of the last trial.
    """
    print(
        "| strategy | at once | trials | wall-clock s | of serial | regret when done | best found |\n|" + " --- |" * 7
    )
    figures: dict[str, Any] = {}
    for name in names:
        for label, known in ((name, sweeps), (f"{name}, first run on a chip", ())):
            alone = None
            for number in (1, *numbers):
                search = by_strategy(plugins.strategy(name), known, at_once=number)
                found = [_figures(sweep, search(sweep)[0]) for sweep in sweeps[::every]]
                trials, wall, regret = (np.array(column) for column in zip(*found, strict=True))
                alone = wall if alone is None else alone
                figures[f"{label}, {number}"] = line = {
                    "trials": float(trials.mean()),
                    "wall_clock_s": float(wall.mean()),
                    "of_serial": float(wall.sum() / alone.sum()),
                    "regret_when_done": float(regret.mean()),
                    "best_kept_within_1pct": float((regret <= 0.01).mean()),
                }
                count, seconds, share, slower, kept = line.values()
                cells = f"{count:.1f} | {seconds:.1f} | {share:.1%} | {slower:.2%} | {kept:.1%}"
                print(f"| {label} | {number} | {cells} |", flush=True)
    return figures


def _figures(sweep: Sweep, run: Any) -> tuple[float, float, float]:
    """Return the trials of a search, its seconds, and how much slower its best is than the sweep's."""
    return len(run.rows), run.clock[-1], float(np.nanmin(sweep.seconds[list(run.rows)]) / sweep.best - 1.0)
