"""Compares predictions with measured runs, and writes docs/accuracy.md with its charts.

    python benchmarks/accuracy.py FOLDER [--docs docs]

FOLDER holds job records with a `measured` part, `train_jobs.jsonl` and `rank_jobs.jsonl`, and runs of fine-tuning with
their `job`, `y2026/post_training.jsonl`; any may be missing. Each record is predicted by `flagcore.api.estimate_jobs`;
none is omitted.
"""

import argparse
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy_page as page
from scatter import grid, scatter
from scores import Pair, errors, ranking, read_records

from flagcore import api
from flagcore.api.inputs import loaded_plugins

UNSEEN = ", *unseen*"
RANK_FIGURES = {
    "static_gib": ("static memory", "static_gib"),
    "peak_allocated_gib": ("peak memory", "peak_allocated_gib"),
    "reserved_gib": ("reserved by the allocator", "reserved_gib"),
    "device_used_gib": ("device in use", "device_used_gib"),
    "compute_time_s": ("compute time", "fwd_bwd_s"),
    "optimizer_time_s": ("optimizer time", "optimizer_s"),
}
"""A rank's predicted figure -> its name on the page, and the key of the measured figure."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value of a job and its prediction, with the predicted interval if there is one."""

    job: Mapping[str, Any]
    measured: float
    predicted: float | None
    interval: tuple[float, float] | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the measurement is in the predicted interval, None without an interval."""
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]


def main() -> None:
    """Write `accuracy.md` and `accuracy-*.svg` into the folder of the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--fitted", type=Path, default=Path(__file__).with_name("fitted.json"))
    options = parser.parse_args()
    train, ranks = (read_records(options.folder / f"{kind}_jobs.jsonl") for kind in ("train", "rank"))
    train = [{**each, "candidate": {**_recomputed(each), **each["candidate"]}} for each in train]
    tuned = _fine_tuning(read_records(options.folder / "y2026" / "post_training.jsonl"))
    with tempfile.TemporaryDirectory() as nothing_calibrated:
        os.environ["FLAGCORE_HOME"] = nothing_calibrated
        answers, rank_answers = [*api.estimate_jobs(train)], [*api.estimate_jobs(ranks)]
        fine_tuning = _steps(tuned, [*api.estimate_jobs(tuned)])
        with loaded_plugins(()) as loaded:
            runs = [{**each, "source": _title(each)} for each in loaded.published_runs()]
        published = _steps(runs, [*api.estimate_jobs(runs)])
        published["*All unseen*"] = [row for name, rows in published.items() if UNSEEN in name for row in rows]
    steps, peaks = _steps(train, answers), _peaks(train, answers)
    options.docs.mkdir(parents=True, exist_ok=True)
    for name, charts in (("time", _charts(steps, "seconds")), ("memory", _charts(peaks, "GiB"))):
        (options.docs / f"accuracy-{name}.svg").write_text(grid(charts), encoding="utf-8")
    fitted = json.loads(options.fitted.read_text(encoding="utf-8")) if options.fitted.exists() else {}
    text = page.text(
        steps=[_summary(source, rows, _groups(rows)) for source, rows in steps.items()],
        published=[_summary(source, rows, {}) for source, rows in published.items()],
        tuned=[_summary(source, rows, {}) for source, rows in fine_tuning.items()],
        peaks=[_summary(source, rows, {}) for source, rows in peaks.items()],
        ranks=_ranks(ranks, rank_answers),
        verdicts=_verdicts((*train, *ranks), (*answers, *rank_answers)),
        unpredicted=_jobs_without_prediction((*train, *ranks), (*answers, *rank_answers)),
        fitted_curves=fitted,
    )
    (options.docs / "accuracy.md").write_text(text, encoding="utf-8")


def _recomputed(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the knobs of full recompute if the measured flops count it, see `hardware_flops`."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return full if "hardware_tflops_per_gpu" in job["measured"] else {}


def _fine_tuning(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the job records of runs of fine-tuning, whose notes also have what the source says of settings."""
    found = []
    for run in runs:
        if run["kind"] in ("sft", "lora"):
            train = run["job"]["train"]
            notes = "; ".join(filter(None, (train.get("notes"), run["flags"])))
            source = run["source"].split()[0] + ", *weak*" * (run["quality"] == "weak")
            found.append(
                {**run["job"], "train": {**train, "notes": notes}, "source": source, "measured": run["measured"]}
            )
    return found


def _title(run: Mapping[str, Any]) -> str:
    """Return the source of a published run without the files that it names, and whether no fit has used it."""
    address = run["source"].split()[0].removeprefix("https://")
    return address + UNSEEN if run.get("unseen") else address


def _steps(jobs: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Row]]:
    """Return step times by source. Rates of flops are converted to times; their runs are a separate source."""
    rows_by_source: dict[str, list[Row]] = defaultdict(list)
    for job, answer in zip(jobs, answers, strict=True):
        step, measured = answer.get("step_time_s"), job["measured"]
        source, seconds = job["source"], measured.get("step_time_s")
        if seconds is None and step and "model_tflops_per_gpu" in measured:
            rate = answer["model_tflops_per_device"] / measured["model_tflops_per_gpu"]
            source, seconds = f"{source} (from model flops)", step["value"] * rate
        elif seconds is None and "hardware_tflops_per_gpu" in measured:
            flops = hardware_flops(job) / job["cluster"]["devices"]
            source, seconds = f"{source} (from hardware flops)", flops / measured["hardware_tflops_per_gpu"] / 1e12
        if seconds:
            value, interval = (step["value"], (step["low"], step["high"])) if step else (None, None)
            rows_by_source[source].append(Row(job=job, measured=seconds, predicted=value, interval=interval))
    return dict(sorted(rows_by_source.items()))


def hardware_flops(job: Mapping[str, Any]) -> float:
    """Return the flops of a step with full recompute: Narayanan et al. 2021 (arXiv 2104.04473), equation 3."""
    model, train = job["model"], job["train"]
    layers, h, s = model["num_layers"], model["hidden_size"], train["seq_length"]
    tokens = train["global_batch_size"] * s
    return float(96 * tokens * layers * h**2 * (1 + s / (6 * h) + model["vocab_size"] / (16 * layers * h)))


def _peaks(jobs: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for job, answer in zip(jobs, answers, strict=True):
        if measured := job["measured"].get("peak_gib"):
            predicted = answer.get("memory", {}).get("peak_allocated_gib")
            found[job["source"]].append(Row(job=job, measured=measured, predicted=predicted))
    return dict(sorted(found.items()))


def _ranks(
    jobs: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, page.Summary]]:
    """Return the metrics of single ranks by source and kind of model, and by name."""
    rows_by_source: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for kind in ("dense", "MoE"):
        for figure, (name, key) in RANK_FIGURES.items():
            for job, answer in zip(jobs, answers, strict=True):
                if bool(job["model"].get("num_moe_experts")) == (kind == "MoE") and (
                    measured := job["measured"].get(key)
                ):
                    row = Row(job=job, measured=measured, predicted=answer.get("rank", {}).get(figure))
                    rows_by_source[f"{job['source']}, {kind}"][name].append(row)
    return {
        source: {name: _summary(name, rows, {}) for name, rows in figures.items()}
        for source, figures in rows_by_source.items()
    }


def _groups(rows: Iterable[Row]) -> dict[object, list[Pair]]:
    """Return groups of runs that differ only in their candidate."""
    groups: dict[object, list[Pair]] = defaultdict(list)
    for row in rows:
        cluster, model, train = row.job["cluster"], row.job["model"], row.job["train"]
        shape = model.get("name"), model["hidden_size"], model["num_layers"]
        work = train["global_batch_size"], train["seq_length"], train["precision"]
        groups[cluster["chip"], cluster["devices"], shape, work].append((row.predicted, row.measured))
    return groups


def _summary(source: str, rows: Sequence[Row], groups: Mapping[object, Sequence[Pair]]) -> page.Summary:
    inside = [row.inside for row in rows if row.inside is not None]
    return page.Summary(
        source=source,
        runs=len(rows),
        errors=errors((row.predicted, row.measured) for row in rows),
        inside=sum(inside) / len(inside) if inside else None,
        ranking=ranking(groups),
    )


def _verdicts(jobs: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> list[page.Verdict]:
    """Return, by source, the number of memory verdicts and the jobs with wrong verdicts.

    Jobs that only have a published memory are skipped, because they may never have run.
    """
    verdict_count: Counter[str] = Counter()
    wrong_jobs: dict[str, list[str]] = defaultdict(list)
    for job, answer in zip(jobs, answers, strict=True):
        fits = None if set(job["measured"]) == {"peak_gib"} else answer.get("memory", {}).get("fits")
        verdict_count[job["source"]] += fits is not None
        if fits is not None and fits == bool(job["measured"].get("oom")):
            wrong_jobs[job["source"]].append(job["id"])
    return [
        page.Verdict(source=source, judged=number, wrong=wrong_jobs[source])
        for source, number in sorted(verdict_count.items())
        if number
    ]


def _jobs_without_prediction(
    jobs: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Return id, source and reason of the jobs without a prediction."""
    pairs = zip(jobs, answers, strict=True)
    return [(job["id"], job["source"], answer["reason"]) for job, answer in pairs if answer["status"] != "ok"]


def _charts(sources: Mapping[str, Iterable[Row]], unit: str) -> list[str]:
    """Return a chart of each source with at least three predicted runs."""
    points = {
        source: [(row.measured, row.predicted, row.inside is not False) for row in rows if row.predicted]
        for source, rows in sources.items()
    }
    return [scatter(source, unit, each) for source, each in points.items() if len(each) >= 3]


if __name__ == "__main__":
    main()
