"""Subsets of sweeps, to check whether results hold for each of them."""

from collections.abc import Sequence

import numpy as np
from sweeps import MIN_CANDIDATES, Sweep, select_rows

DRAWS = 2
SHARE = 0.7


def subsets(sweeps: Sequence[Sweep]) -> dict[str, list[Sweep]]:
    """Return subsets by name: halves of the sweeps, sweeps by cluster size, and parts of their rows."""
    result = {}
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(sweeps)).tolist()
        for name, places in (("first", order[: len(order) // 2]), ("second", order[len(order) // 2 :])):
            result[f"{name} half of the sweeps, draw {draw + 1}"] = [sweeps[place] for place in sorted(places)]
    devices = [sweep.problem.platform.task.cluster.devices for sweep in sweeps]
    for many in sorted(set(devices)):
        result[f"{many} devices"] = [sweep for sweep, own in zip(sweeps, devices, strict=True) if own == many]
    for draw in range(DRAWS):
        fewer = [_subset(sweep, [draw, place]) for place, sweep in enumerate(sweeps)]
        result[f"{SHARE:.0%} of the rows, draw {draw + 1}"] = [
            each for each in fewer if len(each.seconds) >= MIN_CANDIDATES
        ]
    return {name: some for name, some in result.items() if some}


def _subset(sweep: Sweep, seed: list[int]) -> Sweep:
    size = len(sweep.seconds)
    chosen = np.random.default_rng(seed).choice(size, max(1, round(SHARE * size)), replace=False)
    return select_rows(sweep, np.sort(chosen))
