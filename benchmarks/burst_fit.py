"""Fits the kernels of a chip family and the front ends of two engines to published bursts of requests.

    python benchmarks/burst_fit.py RECORDS.jsonl [--family ampere] [--evaluations 120] [--cpus 1 2 4 8 16]

RECORDS are job records with a `measured` part and `request_rate: inf`. Nelder-Mead fits six parameters to the
logarithms of output throughput and, with half the weight, mean TTFT and TPOT, with a soft L1 loss. The output has the
parameters and, for each model, the errors of a fit without this model. Records of other families take the front ends
only. With `--cpus` nothing is fitted: the output has the errors of closed loops if hosts have each number of CPUs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np
import serving_fit
from flagcore_serving.model.predict import predict
from flagcore_serving.model.work import Overheads
from scipy.optimize import minimize

from flagcore import plugins
from flagcore.contracts import Costs
from flagcore.domain.cluster import Cluster
from flagcore.physics.roofline import Curve, Roofline

START = {
    "gemm_share": 0.66,
    "attention_share": 0.53,
    "vllm.entry": 8e-3,
    "vllm.sequence": 160e-6,
    "sglang.entry": 3e-3,
    "sglang.sequence": 60e-6,
}
SPREADS = np.array([0.1, 0.2, 1.0, 1.0, 1.0, 1.0])
"""Standard deviations of the logarithms of the parameters."""

SOFT = 0.1
"""Relative error above which a figure has less weight."""

FIGURES = {"output_tokens_per_s": ("output_tokens_per_s", 1.0), "ttft_s.mean": ("ttft_mean_s", 0.5)}
FIGURES |= {"tpot_s.mean": ("tpot_mean_s", 0.5)}
"""The measured figure and the weight of each predicted one."""


@dataclass(frozen=True)
class Run:
    """A published run: its points with one row, and its measurements."""

    points: serving_fit.Points
    row: int
    measured: dict[str, float]

    @property
    def model(self) -> str:
        return self.points.task.spec.model.name


def predicted(run: Run, values: dict[str, float], family: str) -> dict[str, float]:
    """Return the predicted figures of a run."""
    points, costs = run.points, run.points.costs
    if points.family == family:
        curve = Curve(
            units=serving_fit.UNITS[family],
            memory_share=0.85,
            gemm_share=values["gemm_share"],
            elementwise_share=0.76,
            attention_share=values["attention_share"],
        )
        costs = replace(costs, kernels=Roofline(chip=points.task.cluster.groups[0].chip, curve=curve))
    front_end = {name: values[f"{points.engine}.{name}"] for name in ("entry", "sequence")}
    figures = _figures(run, costs, replace(points.known, **front_end))
    return {name: figures[name] for name in FIGURES}


def print_by_cpus(runs: Sequence[Run], counts: Sequence[int]) -> None:
    """Print the mean errors of output throughput, and of the medians of TTFT and TPOT, by the CPUs of the host."""
    names = {"output_tokens_per_s": "output_tokens_per_s", "ttft_s.p50": "ttft_p50_s", "tpot_s.p50": "tpot_p50_s"}
    for cpus in counts:
        ratios = []
        for run in runs:
            figures = _figures(run, run.points.costs, run.points.known, cpus)
            ratios.append([figures[name] / run.measured[key] for name, key in names.items()])
        errors = np.abs(np.array(ratios) - 1).mean(axis=0)
        print(f"{cpus} CPUs: " + ", ".join(f"{n} {e:.3f}" for n, e in zip(names, errors, strict=True)))


def _figures(run: Run, costs: Costs, overheads: Overheads, cpus: int | None = None) -> dict[str, float]:
    """Return the predicted figures of a run on a host with `cpus`, enough by default."""
    points, engine = run.points, plugins.find_engine(run.points.engine)
    task = points.tasks[run.row]
    group = replace(task.cluster.groups[0], cpus_per_node=cpus)
    spec = replace(task.spec, objective="output_tokens_per_s")
    task = replace(task, spec=spec, cluster=Cluster(groups=(group,)))
    columns = {knob: column[run.row : run.row + 1] for knob, column in points.columns.items()}
    found = predict(task, engine.settings(task, columns), costs, overheads)
    return {name: float(figure[0]) for name, figure in found.figures.items()}


def loss(vector: np.ndarray, runs: Sequence[Run], family: str) -> float:
    """Return the soft loss of parameters, given by the logarithms of their ratios to `START`."""
    values = values_of(vector)
    errors = []
    for run in runs:
        figures = predicted(run, values, family)
        errors += [w * np.log(figures[name] / run.measured[key]) for name, (key, w) in FIGURES.items()]
    soft = 2 * SOFT * (np.sqrt(1 + (np.array(errors) / SOFT) ** 2) - 1)
    return float(soft.sum() + SOFT * ((vector / SPREADS) ** 2).sum())


def values_of(vector: np.ndarray) -> dict[str, float]:
    return dict(zip(START, np.array(list(START.values())) * np.exp(vector), strict=True))


def fit(runs: Sequence[Run], family: str, evaluations: int) -> np.ndarray:
    simplex = np.vstack([np.zeros(len(START)), np.diag(np.minimum(SPREADS, 0.5))])
    options = {"maxfev": evaluations, "initial_simplex": simplex}
    return minimize(loss, simplex[0], args=(runs, family), method="Nelder-Mead", options=options).x


def main() -> None:
    """Fit, and print parameters and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--family", default="ampere")
    parser.add_argument("--evaluations", type=int, default=120)
    parser.add_argument("--cpus", type=int, nargs="+")
    options = parser.parse_args()
    every = [
        Run(points, row, line["measured"])
        for points in serving_fit.read([str(options.records)])
        for row, line in enumerate(points.lines)
    ]
    is_burst = [run.points.tasks[run.row].spec.serve.loads[0].request_rate is not None for run in every]
    runs = list(compress(every, is_burst))
    if options.cpus:
        print_by_cpus([run for run, burst in zip(every, is_burst, strict=True) if not burst], options.cpus)
        return
    fitted = [run for run in runs if run.points.family == options.family]
    values = values_of(fit(fitted, options.family, options.evaluations))
    print({name: float(f"{value:.3g}") for name, value in values.items()})
    for model in sorted({run.model for run in runs}):
        others = [run for run in fitted if run.model != model]
        values = values_of(fit(others, options.family, options.evaluations))
        for family in sorted({run.points.family for run in runs if run.model == model}):
            left_out = [run for run in runs if run.model == model and run.points.family == family]
            ratios = [
                predicted(run, values, options.family)["output_tokens_per_s"] / run.measured["output_tokens_per_s"]
                for run in left_out
            ]
            error = float(np.mean(np.abs(np.array(ratios) - 1)))
            print(f"{model:40s} {family:10s} {len(ratios):3d} runs, left out: throughput {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
