"""Fits the curve parameters of each chip family to published runs, and reports leave-one-source-out errors.

    python benchmarks/fit_curves.py FOLDER [--write] [--family NAME ...]

FOLDER has `train_jobs.jsonl` (job records with a `measured` part). All sources have the same total weight. A penalty
keeps parameters near their starting values. With `--write` the curves are written into the plugins'
`costs/<chip>/curve.yaml`, and the errors into `benchmarks/fitted.json`. With `--family`, only these families change.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flagcore_megatron.predict import base_inputs
from flagcore_training.layout import Layout, Training
from flagcore_training.time.step import step_time
from flagcore_vendorkit.chip_file import shared_costs
from scipy.optimize import least_squares

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Costs, Engine
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.space import BoolArray, Columns, FloatArray
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.physics.roofline import Curve, Roofline
from flagcore.spec.jobs import read_job

PLUGINS = Path(__file__).parent.parent / "plugins"
BACKWARD = 0.8
"""Ratio of the shares of the peak of attention backward and forward, from measured kernels: runs do not identify it."""

PENALTY_SPREAD = 0.25
"""Deviation of the logarithm of a parameter from its start whose penalty equals one typical error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Chips of one design that share a curve, with the starting values of its parameters.

    Parameters in `fixed` are not fitted; `note` gives their sources. A parameter with a dot, such as `gemm_shares.fp8`,
    is an entry of a mapping. `power` has chips whose higher power limit multiplies the shares of their peak flops.
    `attention` has the speed of kernels of attention relative to the default one.
    """

    chips: tuple[str, ...]
    package: str
    fixed: Mapping[str, float]
    start: Mapping[str, float]
    note: str
    power: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)


ULTRA = 1.2
"""The speed of a GB300 relative to a GB200: the median of four pairs of published runs with the same layout (1.17 to
1.22, bf16 and fp8; Megatron-Bridge). Both have the same peaks in these precisions, but not the same power limit. The 15
runs on B300 do not support a factor over B200."""

FAMILIES = {
    "ampere": Family(
        chips=("A100-80GB", "A100-40GB", "A100-80GB-PCIe", "A100-40GB-PCIe", "A800-80GB", "A800-80GB-PCIe"),
        package="nvidia/flagcore_nvidia",
        fixed={"units": 108.0, "memory_share": 0.85, "attention_share": 0.55, "gemm_shares.fp32": 0.96},
        start={"gemm_share": 0.8, "elementwise_share": 0.8, "tile_overhead": 143.0, "launch_seconds": 11e-6},
        note="fp32 products as measured: 18.1 to 19.1 TFLOP/s (FlagOpen/FlagPerf computation-FP32, "
        "zzc0721/torch-performance-test-data)",
    ),
    "hopper": Family(
        chips=("H100-SXM", "H100-PCIe", "H800"),
        package="nvidia/flagcore_nvidia",
        fixed={
            "units": 132.0,
            "memory_share": 0.91,
            "host_bytes_per_second": 55e9,
            "gemm_shares.fp32": 0.9,
            "launch_seconds": 1.37e-5,
        },
        start={
            "gemm_share": 0.7,
            "gemm_shares.fp8": 0.7,
            "elementwise_share": 0.8,
            "attention_share": 0.6,
            "attention_shares.flash": 0.38,
        },
        note="attention of FlashAttention 2 apart from cuDNN's; launches fitted to the same runs afterwards; fp32"
        " products estimated: what those of the generations before and after reached in measurements",
    ),
    "blackwell": Family(
        chips=("B200", "GB200", "B300", "GB300"),
        package="nvidia/flagcore_nvidia",
        fixed={"units": 148.0, "memory_share": 0.85, "host_bytes_per_second": 55e9, "gemm_shares.fp32": 0.9},
        start={
            "gemm_share": 0.55,
            "gemm_shares.fp8": 0.7,
            "gemm_shares.mxfp8": 0.7,
            "gemm_shares.nvfp4": 0.7,
            "elementwise_share": 0.6,
            "attention_share": 0.4,
        },
        note="fp32 products as measured on a B200: 66.2 TFLOP/s (zzc0721/torch-performance-test-data); products and"
        " attention of GB300 1.2 times as fast, as in pairs of published runs: its power limit is higher; attention in"
        " FP8 relative to bf16 as in NVIDIA/cudnn-frontend benchmark/sdpa_benchmark_training/results @3929da2 (GB200)",
        power={"GB300": ULTRA},
        attention={"fp8": 1.43, "mxfp8": 1.26},
    ),
}


@dataclass(frozen=True, slots=True)
class Runs:
    """Measured runs of one family. Runs with the same model on the same cluster are predicted together."""

    groups: tuple[tuple[Training, Layout, NodeGroup, Costs, tuple[int, ...]], ...]
    measured: FloatArray
    sources: tuple[str, ...]

    def predicted(self, family: Family, parameters: Mapping[str, float]) -> FloatArray:
        """Return the predicted seconds of a step for each run."""
        seconds = np.full(len(self.measured), np.nan)
        for train, layout, group, result, rows in self.groups:
            curve = curve_of(family, parameters, group.chip.name)
            with_curve = replace(result, kernels=Roofline(chip=group.chip, curve=curve))
            seconds[list(rows)] = sum(step_time(train, layout, with_curve).values())
        return seconds


def main() -> None:
    """Fit every family, print the results, and write them with `--write`."""
    from scores import read_records

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the plugins' curves and benchmarks/fitted.json")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options = parser.parse_args()
    records = read_records(options.folder / "train_jobs.jsonl")
    path = Path(__file__).with_name("fitted.json")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name in options.family:
        family = FAMILIES[name]
        runs = _runs(records, family)
        parameters, report[name] = _family(family, runs)
        print(json.dumps({name: {"parameters": parameters, **report[name]}}, indent=1))
        if options.write:
            _write(family, parameters, report[name])
    if options.write:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _family(family: Family, runs: Runs) -> tuple[dict[str, float], dict[str, Any]]:
    all_runs = np.ones(len(runs.measured), dtype=bool)
    parameters = _fit(family, runs, all_runs)
    fit_errors = np.abs(runs.predicted(family, parameters) / runs.measured - 1.0)
    sources = np.array(runs.sources)
    report: dict[str, Any] = {}
    outside = []
    for source in dict.fromkeys(runs.sources):
        in_source = sources == source
        left_out = parameters if in_source.all() else _fit(family, runs, ~in_source)
        ratio = runs.measured[in_source] / runs.predicted(family, left_out)[in_source]
        outside.append(ratio)
        report[source] = {
            "runs": int(in_source.sum()),
            "fitted_mape": round(float(fit_errors[in_source].mean()), 4),
            "left_out_mape": None if in_source.all() else round(float(np.abs(1.0 / ratio - 1.0).mean()), 4),
            "left_out_parameters": dict(family.start) if in_source.all() else left_out,
            "left_out_measured_over_predicted": [round(float(np.quantile(ratio, at)), 3) for at in (0.1, 0.5, 0.9)],
        }
    return parameters, {"sources": report}


def _fit(family: Family, runs: Runs, used: BoolArray) -> dict[str, float]:
    """Return the parameters that fit the runs in `used`: robust least squares of logarithms."""
    sources = np.array(runs.sources)
    weight = np.zeros(len(sources))
    for source in dict.fromkeys(sources[used]):
        weight[used & (sources == source)] = 1.0 / np.sqrt((used & (sources == source)).sum())
    names = list(family.start)

    def errors(shifts: Sequence[float]) -> FloatArray:
        error = np.log(runs.predicted(family, _shifted(family, names, shifts))[used] / runs.measured[used])
        return np.concatenate([10.0 * weight[used] * error, np.asarray(shifts) / PENALTY_SPREAD])

    found = least_squares(errors, np.zeros(len(names)), diff_step=0.02, loss="soft_l1", max_nfev=12)
    return {name: float(f"{value:.3g}") for name, value in _shifted(family, names, found.x).items()}


def _shifted(family: Family, names: Iterable[str], shifts: Iterable[float]) -> dict[str, float]:
    return {name: family.start[name] * float(np.exp(shift)) for name, shift in zip(names, shifts, strict=True)}


def curve_of(family: Family, parameters: Mapping[str, float], chip: str) -> Curve:
    """Return the curve of a chip of a family for `parameters`."""
    return Curve(**_arguments(family, parameters, chip))


def _arguments(family: Family, parameters: Mapping[str, float], chip: str) -> dict[str, Any]:
    power = family.power.get(chip, 1.0)
    faster = {
        key: round(value * power, 3) for key, value in parameters.items() if key.startswith(("gemm", "attention"))
    }
    reported = {**family.fixed, **parameters, **(faster if power != 1.0 else {})}
    values: dict[str, Any] = {key: value for key, value in reported.items() if "." not in key}
    values["attention_backward_share"] = round(BACKWARD * values["attention_share"], 3)
    shares = {name: round(times * values["attention_share"], 3) for name, times in family.attention.items()}
    values |= {"attention_shares": shares} if shares else {}
    for key, value in reported.items():
        part, _, name = key.partition(".")
        if name:
            values.setdefault(part, {})[name] = value
    return values


def _runs(records: Iterable[Mapping[str, Any]], family: Family) -> Runs:
    engine = plugins.find_engine("megatron")
    measured, sources = [], []
    groups: dict[str, list[tuple[Training, Layout, Task, int]]] = defaultdict(list)
    with loaded_plugins(()) as loaded:
        known = [chip for name in family.chips if (chip := loaded.find_chip(name))]
        names = {alias.casefold() for chip in known for alias in chip.aliases}
        for record in records:
            seconds = record["measured"].get("step_time_s")
            if seconds and record["cluster"]["chip"].casefold() in names:
                task, columns = _task_of(record, engine, loaded.find_chip)
                train, layout = base_inputs(task, columns)
                train = replace(train, global_batch=0)
                groups[repr((train, task.cluster))].append((train, layout, task, len(measured)))
                measured.append(seconds)
                sources.append(record["source"])
        tasks = tuple(
            (
                rows[0][0],
                _together([row[1] for row in rows]),
                rows[0][2].cluster.groups[0],
                loaded.costs(rows[0][2].cluster, "megatron"),
                tuple(row[3] for row in rows),
            )
            for rows in groups.values()
        )
    return Runs(tasks, np.array(measured), tuple(sources))


def _together(layouts: Sequence[Layout]) -> Layout:
    names = [part.name for part in fields(Layout) if part.name not in ("further", "here")]
    return Layout(**{name: np.concatenate([getattr(each, name) for each in layouts]) for name in names})


def _task_of(record: Mapping[str, Any], engine: Engine, find_chip: Callable[[str], Any]) -> tuple[Task, Columns]:
    job = read_job(record, plugins.engines())
    devices = min(job.devices_per_node, job.devices)
    group = NodeGroup(chip=find_chip(job.chip), nodes=job.devices // devices, devices_per_node=devices)
    spec = Spec(model=job.model, cluster=ClusterSpec(chip=group.chip.name), work=job.work)
    task, values, *_ = engine.published(Task(spec=spec, cluster=Cluster(groups=(group,))), job.candidate, job.notes)
    return task, engine.columns(task, values)


def _write(family: Family, parameters: Mapping[str, float], report: Mapping[str, Any]) -> None:
    """Write the curve of every chip of the family; it is fitted to the first chip and shared by design.

    A chip to which the plugin's `costs/same_as.yaml` applies the curve of another one has no file.
    """
    runs = sum(source["runs"] for source in report["sources"].values())
    shared = shared_costs(Path(family.package).name)
    for chip in (each for each in family.chips if (each.casefold(), "curve.yaml") not in shared):
        path = PLUGINS / family.package / "costs" / chip.casefold() / "curve.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        method = f"fitted by benchmarks/fit_curves.py to {runs} published runs on {', '.join(family.chips[:4])}"
        source = {"kind": "estimated", "method": f"{method}: {', '.join(report['sources'])}; {family.note}"}
        curve = _arguments(family, parameters, chip)
        known = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {"curve": {}, "source": {"method": ""}}
        curve = {**{name: each for name, each in known["curve"].items() if name == "launch_seconds"}, **curve}
        if "host_bytes_per_second" in known["curve"]:
            curve["host_bytes_per_second"] = known["curve"]["host_bytes_per_second"]
            _, link, host_link = known["source"]["method"].partition("; host link:")
            source["method"] += link + host_link
        content = {"curve": curve, "source": source}
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=110), encoding="utf-8")


if __name__ == "__main__":
    main()
