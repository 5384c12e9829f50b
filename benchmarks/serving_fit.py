"""Fits the overheads of serving engines and the efficiency of their kernels to published points.

    python benchmarks/serving_fit.py RECORDS.jsonl [MORE.jsonl ...] [--rounds 5] [--write LEFT_OUT.jsonl]

RECORDS are job records with a `measured` part (docs/results.md). Gauss-Newton fits all parameters together to the
logarithms of TPOT (and, for vLLM, with a small weight, TTFT) in closed form, with a soft L1 loss and priors around
estimates. There is one set of parameters per engine and one per family of chips, none per row, model or chip. The
output has the parameters, and the errors of each (chip, model) that is left out of the fit, approximated by one more
step. With `--write` the records are predicted by simulation with the parameters of the fit without their chip and
model.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flagcore_serving.model.closed_loop import ClosedLoop, steady_state
from flagcore_serving.model.iteration import iteration_costs
from flagcore_serving.model.memory import serving_memory
from flagcore_serving.model.predict import predict, serving_of
from flagcore_serving.model.work import Overheads

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Costs
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.records import prediction_record
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.physics.roofline import Curve, Roofline
from flagcore.spec.jobs import read_job
from flagcore.tuner.stages.predict import with_figures

SOFT = 0.1
"""Relative error above which a point has less weight."""

STEP = 0.02
WEIGHTS = {"tpot": 1.0, "ttft": {"vllm": 0.15, "sglang": 0.0}}
PRIOR_WEIGHT = 2.5
"""Weight of the priors: the error of a point that weighs as much as a deviation of a parameter by its spread."""

CHIP = {
    "memory_share": (0.8, 0.08),
    "bf16": (0.7, 0.12),
    "fp8": (0.6, 0.2),
    "nvfp4": (0.5, 0.25),
    "attention_share": (0.5, 0.3),
}
ENGINE = {
    "iteration": (2e-3, 0.7),
    "sequence": (10e-6, 1.0),
    "attention": (25e-6, 0.5),
    "latent": (20e-6, 0.5),
    "ffn": (15e-6, 0.5),
    "experts8": (50e-6, 0.5),
    "experts4": (30e-6, 0.5),
    "reduce": (8e-6, 0.5),
    "reduce_doubling": (2e-6, 0.7),
    "grouped_share": (0.8, 0.25),
    "grouped_work": (0.6, 0.4),
    "spread": (0.7, 0.4),
    "eager_kernels": (55.0, 0.2),
    "eager_experts": (20.0, 0.7),
    "eager_latent": (30.0, 0.7),
}
"""Prior and spread (of its logarithm) of each parameter."""

FAMILIES = {"A": "ampere", "H": "hopper", "B": "blackwell", "G": "blackwell"}
UNITS = {"ampere": 108.0, "hopper": 132.0, "blackwell": 148.0}


@dataclass(frozen=True)
class Points:
    """The records of one chip, engine and model."""

    rows: np.ndarray
    task: Task
    engine: str
    family: str
    name: str
    columns: Mapping[str, np.ndarray]
    costs: Costs
    lines: tuple[dict, ...]
    tasks: tuple[Task, ...]
    known: Overheads
    lens: np.ndarray
    tpot: np.ndarray
    ttft: np.ndarray
    odd: bool


def read(files: Sequence[str]) -> list[Points]:
    """Return the records, grouped by task."""
    lines = [json.loads(line) for file in files for line in Path(file).read_text("utf-8").splitlines()]
    groups: dict[tuple[object, ...], list[tuple[int, dict, Task, dict]]] = defaultdict(list)
    chips: dict[tuple[object, ...], tuple[Costs, NodeGroup]] = {}
    with loaded_plugins(()) as loaded:
        for index, line in enumerate(lines):
            job = read_job(line, plugins.engines())
            chip, devices = loaded.find_chip(job.chip), min(job.devices_per_node, job.devices)
            key = (chip.name, job.devices, job.cpus_per_node, job.work.engine)
            if key not in chips:
                nodes, cpus = job.devices // devices, job.cpus_per_node
                group = NodeGroup(chip=chip, nodes=nodes, devices_per_node=devices, cpus_per_node=cpus)
                chips[key] = loaded.costs(Cluster(groups=(group,)), job.work.engine), group
            spec = Spec(model=job.model, cluster=ClusterSpec(chip=chip.name), work=job.work)
            engine = plugins.find_engine(job.work.engine)
            plain_task = Task(spec=spec, cluster=Cluster(groups=(chips[key][1],)))
            task, values, *_ = engine.published(plain_task, job.candidate, "")
            columns = engine.columns(task, values)
            version = task.spec.serve.engine_version
            groups[(*key, job.model, job.work.precision, version)].append((index, line, task, columns))
    points = []
    for (chip, devices, cpus, engine, model, precision, _), rows in groups.items():
        lines_of, tasks = [row[1] for row in rows], [row[2] for row in rows]
        loads = [task.spec.serve.loads[0] for task in tasks]
        lens = [(load.input_len, load.output_len, load.concurrency or 1) for load in loads]
        measured = [line["measured"] for line in lines_of]
        points.append(
            Points(
                rows=np.array([row[0] for row in rows]),
                task=tasks[0],
                engine=engine,
                family=FAMILIES[chip[0]],
                name=f"{chip} {model.name.split('/')[-1]}",
                columns={knob: np.concatenate([row[3][knob] for row in rows]) for knob in rows[0][3]},
                costs=chips[chip, devices, cpus, engine][0],
                lines=tuple(lines_of),
                tasks=tuple(tasks),
                known=plugins.find_engine(engine).overheads_for(tasks[0], on_host=False),
                lens=np.array(lens, dtype=float),
                tpot=np.array([each.get("tpot_mean_s") or each.get("tpot_p50_s") for each in measured]),
                ttft=np.array([each.get("ttft_mean_s") or each.get("ttft_p50_s") for each in measured]),
                odd=_is_contradictory(
                    chip, devices, engine, model.name, precision, lines_of[0]["serve"].get("engine_version") or ""
                ),
            )
        )
    return points


def _is_contradictory(chip: str, devices: int, engine: str, model: str, precision: str, version: str) -> bool:
    """Return whether points contradict themselves; they are excluded from the fit, but not from the errors.

    Examples are more devices than the measured node has (16 and 64, with the values of 4 and 8), a 235 GB model on one
    device of 141 GB, more arithmetic than the chip's peak, and a start-up of seconds in every first token.
    """
    started = "DeepSeek" in model and not version
    return devices > 8 or "235B" in model or (chip == "H200" and engine == "vllm" and precision == "fp8") or started


def parameters(engines: Sequence[str], families: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the prior and the spread of each parameter."""
    names = {f"{family}.{key}": prior for family in families for key, prior in CHIP.items()}
    return names | {f"{engine}.{key}": prior for engine in engines for key, prior in ENGINE.items()}


def curve_of(family: str, values: Mapping[str, float]) -> Curve:
    """Return a family's curve."""
    parameters = {key: values[f"{family}.{key}"] for key in CHIP}
    return Curve(
        units=UNITS[family],
        gemm_share=parameters["bf16"],
        gemm_shares={"fp8": parameters["fp8"], "mxfp8": parameters["fp8"], "nvfp4": parameters["nvfp4"]},
        memory_share=parameters["memory_share"],
        elementwise_share=0.9 * parameters["memory_share"],
        attention_share=parameters["attention_share"],
    )


def overheads_of(engine: str, values: Mapping[str, float], known: Overheads) -> Overheads:
    """Return an engine's overheads; those that are not fitted stay unchanged."""
    overheads = {key: values[f"{engine}.{key}"] for key in ENGINE}
    wide, narrow = overheads.pop("experts8"), overheads.pop("experts4")
    if not known.iteration:  # a release that hides it
        overheads["iteration"] = 0.0
    return replace(known, **overheads, experts={"bf16": wide, "fp8": wide, "nvfp4": narrow})


def prediction_inputs(points: Points, values: Mapping[str, float]) -> tuple[Costs, Overheads]:
    """Return the inputs of the predictions of points."""
    kernels = Roofline(chip=points.task.cluster.groups[0].chip, curve=curve_of(points.family, values))
    return replace(points.costs, kernels=kernels), overheads_of(points.engine, values, points.known)


def errors(points: Points, values: Mapping[str, float]) -> np.ndarray:
    """Return the logarithms of predicted over measured TPOT and TTFT."""
    costs, overheads = prediction_inputs(points, values)
    engine = plugins.find_engine(points.engine)
    settings = engine.settings(points.task, points.columns)
    serving = serving_of(points.task, costs.kernels, overheads)
    memory = serving_memory(serving, settings, costs)
    prompt, output, flight = points.lens.T
    predicted_s = steady_state(
        ClosedLoop(
            costs=iteration_costs(serving, settings, costs),
            overheads=overheads,
            flight=np.maximum(flight / settings.instances, 1.0),
            prompt=prompt,
            output=output,
            budget=settings.max_batched_tokens * settings.data * settings.pipeline,
            running=settings.max_running * settings.data,
            cache_tokens=np.maximum(memory.cache_tokens, 1.0),
            fixed=memory.sequence_tokens,
            ranks=settings.data,
            stages=settings.pipeline,
        )
    )
    ratios = np.log([predicted_s.tpot / points.tpot, predicted_s.ttft / points.ttft])
    return np.clip(np.nan_to_num(ratios, nan=3.0), -3.0, 3.0)


class Fit:
    """Gauss-Newton with priors over the logarithms of parameters."""

    def __init__(self, points: list[Points]) -> None:
        self.points = points
        self.size = 1 + max(int(each.rows.max()) for each in points)
        engines = sorted({each.engine for each in points})
        priors = parameters(engines, sorted({each.family for each in points}))
        self.names = list(priors)
        self.prior, self.spread = np.array(list(priors.values())).T
        self.used, self.names_of = np.zeros(self.size), np.empty(self.size, dtype=object)
        weights = np.zeros((2, self.size))
        for each in points:
            self.used[each.rows], self.names_of[each.rows] = not each.odd, each.name
            weights[:, each.rows] = np.array([1.0, WEIGHTS["ttft"].get(each.engine, 0.0)])[:, None]
        self.weights = weights

    def values(self, vector: np.ndarray) -> dict[str, float]:
        """Return parameters by name."""
        return dict(zip(self.names, self.prior * np.exp(vector), strict=True))

    def ratios(self, vector: np.ndarray, points: Sequence[Points], start: np.ndarray) -> np.ndarray:
        """Return the errors; those of other points are copied from `start`."""
        found, values = start.copy(), self.values(vector)
        for each in points:
            found[:, each.rows] = errors(each, values)
        return found

    def slopes(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the errors and their derivatives by parameter."""
        start_errors = self.ratios(vector, self.points, np.zeros((2, self.size)))
        slopes = np.zeros((len(self.names), 2, self.size))
        for number, name in enumerate(self.names):
            owner = name.partition(".")[0]
            moved = vector.copy()
            moved[number] += STEP
            mine = [each for each in self.points if owner in (each.engine, each.family)]
            slopes[number] = (self.ratios(moved, mine, start_errors) - start_errors) / STEP
        return start_errors, slopes

    def step(self, vector: np.ndarray, start_errors: np.ndarray, slopes: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the parameters after one step on some rows."""
        weighed = start_errors * self.weights
        trust = self.weights**2 * rows / np.sqrt(1.0 + (weighed / SOFT) ** 2) / SOFT**2
        flat = slopes.reshape(len(vector), -1)
        normal = (flat * trust.reshape(-1)) @ flat.T + np.diag((PRIOR_WEIGHT / self.spread) ** 2)
        right = (flat * trust.reshape(-1)) @ start_errors.reshape(-1) + (PRIOR_WEIGHT / self.spread) ** 2 * vector
        solution = vector - np.linalg.solve(normal, right)
        return vector + np.clip(solution - vector, -0.5, 0.5)


def simulated(points: Points, values: Mapping[str, float]) -> list[dict]:
    """Return the predictions of the records of points."""
    costs, overheads = prediction_inputs(points, values)
    answers = []
    for row, (line, task) in enumerate(zip(points.lines, points.tasks, strict=True)):
        task = replace(task, spec=replace(task.spec, objective="output_tokens_per_s"))
        columns = {knob: column[row : row + 1] for knob, column in points.columns.items()}
        engine = plugins.find_engine(points.engine)
        found = predict(task, engine.settings(task, columns), costs, overheads)
        answers.append({"id": line["id"], "status": "ok", **prediction_record(with_figures(task, found.row(0)))})
    return answers


def main() -> None:
    """Fit, and print parameters and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    fit = Fit(read(options.records))
    vector = np.zeros(len(fit.names))
    for _ in range(options.rounds):
        start_errors, slopes = fit.slopes(vector)
        vector = fit.step(vector, start_errors, slopes, fit.used)
        print(f"TPOT median {np.median(np.abs(np.expm1(start_errors[0][fit.used > 0]))):.3f}", flush=True)
    start_errors, slopes = fit.slopes(vector)
    print(json.dumps({name: float(f"{value:.3g}") for name, value in fit.values(vector).items()}, indent=1))
    left_out, lines = np.zeros(fit.size), []
    for name in sorted(set(fit.names_of)):
        own_rows = fit.names_of == name
        moved = fit.step(vector, start_errors, slopes, fit.used * ~own_rows)
        left_out[own_rows] = (start_errors[0] + np.tensordot(moved - vector, slopes[:, 0], 1))[own_rows]
        if options.write:
            for each in (each for each in fit.points if each.name == name):
                lines += simulated(each, fit.values(moved))
        off = np.abs(np.expm1(left_out[own_rows]))
        with_rows = np.median(np.abs(np.expm1(start_errors[0][own_rows])))
        report = f"TPOT left out: median {np.median(off):.3f} mean {off.mean():.3f}"
        print(f"{name:40s} {own_rows.sum():4d} rows  {report}  with it: {with_rows:.3f}")
    print(f"all rows, left out: median {np.median(np.abs(np.expm1(left_out))):.3f}")
    if options.write:
        options.write.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
