"""Measures how much the first trials of a serving space improve the predictions of the rest.

    python benchmarks/first_trials.py RECORDS.jsonl [MORE.jsonl ...] [--draws 20] [--across-loads]

RECORDS are job records with a `measured` part. Records of the same chip, engine, release, model and load are one space,
if there are at least four; with `--across-loads` the loads are one space. Some of them, drawn at random, are the first
trials; the correction that `flag tune` learns from them predicts the others. The output has the median of
|predicted / measured - 1| of the output tokens per second, before and after, and the share of spaces in which it is
lower after.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import serving_fit
from flagcore_serving.model.predict import predict

from flagcore import plugins
from flagcore.domain.prediction import Features, Observations, features
from flagcore.tuner.learning import MIN_NOISE
from flagcore.tuner.ratios import TIME, Ratios

MIN_RECORDS, COUNTS = 4, (1, 2, 3)


def main() -> None:
    """Print the errors by the number of first trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--across-loads", action="store_true")
    options = parser.parse_args()
    spaces = [
        space for points in serving_fit.read(options.records) for space in spaces_of(points, options.across_loads)
    ]
    records = sum(ratios.size for ratios, _ in spaces)
    print(f"{len(spaces)} spaces with {records} records")
    rng = np.random.default_rng(0)
    for count in COUNTS:
        before, after, better = list[float](), list[float](), list[bool]()
        for ratios, rows in spaces:
            errors = np.array(
                [_errors(ratios, rows, rng.permutation(ratios.size), count) for _ in range(options.draws)]
            )
            before += errors[:, 0].ravel().tolist()
            after += errors[:, 1].ravel().tolist()
            better.append(bool(np.median(errors[:, 1]) <= np.median(errors[:, 0])))
        line = f"{count} first trials: {np.median(before):.3f} before, {np.median(after):.3f} after"
        print(f"{line}, lower in {np.mean(better):.0%} of the spaces", flush=True)


def spaces_of(points: serving_fit.Points, across_loads: bool) -> list[tuple[np.ndarray, Features]]:
    """Return the log-ratios of measured to predicted times, and the features, of each space."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, task in enumerate(points.tasks):
        groups[task.spec.serve.loads[0]].append(row)
    spaces = [_space(points, rows) for rows in groups.values()]
    if across_loads:
        spaces = [(np.concatenate([ratios for ratios, _ in spaces]), Features.join([rows for _, rows in spaces]))]
    return [space for space in spaces if space[0].size >= MIN_RECORDS]


def _space(points: serving_fit.Points, rows: Sequence[int]) -> tuple[np.ndarray, Features]:
    task, engine = points.tasks[rows[0]], plugins.find_engine(points.engine)
    task = replace(task, spec=replace(task.spec, objective="output_tokens_per_s"))
    columns = {knob: column[rows] for knob, column in points.columns.items()}
    predictions = predict(task, engine.settings(task, columns), points.costs, points.known)
    load = task.spec.serve.loads[0]
    rates = [_rate(points.lines[row]["measured"], load.concurrency or 1, load.output_len) for row in rows]
    axes = [axis for axis in engine.axes(task) if axis.knob in columns]
    found = features(axes, columns, predictions, engine.sizes(task, columns))
    return -np.log(np.array(rates) * predictions.step_time_s), found


def _rate(measured: Mapping[str, float], flight: int, output: int) -> float:
    """Return the output tokens per second; those of a closed loop follow from Little's law."""
    if rate := measured.get("output_tokens_per_s"):
        return rate
    ttft, tpot = (measured.get(f"{name}_mean_s") or measured[f"{name}_p50_s"] for name in ("ttft", "tpot"))
    return flight * output / (ttft + (output - 1) * tpot)


def _errors(ratios: np.ndarray, rows: Features, order: Sequence[int], count: int) -> tuple[list[float], list[float]]:
    """Return the errors of the records after the first `count` of `order`, without and with the correction."""
    first, rest = np.array(order[:count]), np.array(order[count:])
    known = Observations(
        features=rows.take(first), log_ratio=ratios[first], noise=np.full(count, MIN_NOISE), task=np.zeros(count, int)
    )
    corrected = Ratios(known, rows, TIME).posterior(rows.take(rest)).mean
    return np.abs(np.expm1(ratios[rest])).tolist(), np.abs(np.expm1(ratios[rest] - corrected)).tolist()


if __name__ == "__main__":
    main()
