"""Compares the wall-clock time of searches with several concurrent trials and with one trial at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from searchers import by_strategy
from sweeps import Sweep

from flagcore import plugins


def print_at_once(
    names: Sequence[str], sweeps: Sequence[Sweep], numbers: Sequence[int], searches: int
) -> dict[str, Any]:
    """Print a table with a line for each strategy and number of concurrent trials, and return its values.

    Wall-clock is from the baseline to the end of the last trial.
    """
    print(
        "| strategy | at once | trials | wall-clock s | of serial | regret when done | best found |\n|" + " --- |" * 7
    )
    figures: dict[str, Any] = {}
    for name in names:
        for label, known in ((name, sweeps), (f"{name}, first run on a chip", ())):
            sequential = None
            for number in (1, *numbers):
                search = by_strategy(plugins.strategy(name), known, at_once=number)
                found = [_figures(sweep, search(sweep)[0]) for sweep in sweeps[::searches]]
                trials, wall, regret = (np.array(column) for column in zip(*found, strict=True))
                sequential = wall if sequential is None else sequential
                figures[f"{label}, {number}"] = line = {
                    "trials": float(trials.mean()),
                    "wall_clock_s": float(wall.mean()),
                    "of_serial": float(wall.sum() / sequential.sum()),
                    "regret_when_done": float(regret.mean()),
                    "best_kept_within_1pct": float((regret <= 0.01).mean()),
                }
                count, seconds, share, slower, best_share = line.values()
                cells = f"{count:.1f} | {seconds:.1f} | {share:.1%} | {slower:.2%} | {best_share:.1%}"
                print(f"| {label} | {number} | {cells} |", flush=True)
    return figures


def _figures(sweep: Sweep, search: Any) -> tuple[float, float, float]:
    """Return the trials of a search, its seconds, and the slowdown of its best candidate against the sweep's best."""
    return len(search.rows), search.clock[-1], float(np.nanmin(sweep.seconds[list(search.rows)]) / sweep.best - 1.0)
