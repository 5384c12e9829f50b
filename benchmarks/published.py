"""Compares published runs, those that the installed plugins ship and those of job files, with their predictions.

python benchmarks/published.py [VENDOR|FILE.jsonl ...] [unseen]

With `unseen`, only those of the plugins that no fit has used. Each record is a job with its source, what the source
leaves open (`assumed`), and the published figures.

No parameter was fitted to `published_serving.jsonl`. Its records were drawn at random from all points of their groups,
except that wide expert parallelism has all: each group and figure has the median of predicted / published, the median
error, the share within 25%, and the number of errors above a factor of two.

`wide_ep.jsonl` has tokens per second of a device: of answers as `measured.decode`, of prompts as `measured.prefill`.
For decode instances, the mean context is the published one, but answers are longer, so that the simulated prefill
instances keep up.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from flagcore import api
from flagcore.api.inputs import loaded_plugins


def figures(job: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[tuple[str, float, float, str]]:
    """Yield the name of each published figure, its published and its predicted value, and a remark."""
    measured, serve = job["measured"], job.get("serve", {})
    if "step_time_s" in measured:
        step, seconds = answer["step_time_s"], measured["step_time_s"]
        inside = "inside" if step["low"] <= seconds <= step["high"] else "outside"
        yield "seconds", seconds, step["value"], f", {inside} 80%"
    elif "decode" in measured:
        yield "answer tokens/s", measured["decode"], measured["running"] / answer["tpot_s"]["p50"], ""
    elif "prefill" in measured:
        rate = answer["requests_per_s"] * serve["input_len"] / measured["devices"]
        yield "prompt tokens/s", measured["prefill"], rate, ""
    else:
        for name, value in measured.items():
            figure, _, statistic = name.removesuffix("_s").rpartition("_")
            latency = answer.get(f"{figure}_s")
            yield name, value, latency[statistic] if isinstance(latency, dict) else answer[name], ""


def main() -> None:
    """Print each figure of the runs of vendors and files, or a table of those that belong to groups."""
    with loaded_plugins(()) as loaded:
        records = loaded.published_runs()
        vendors = {chip.name: chip.vendor for chip in loaded.chips()}
    chosen = [each for each in sys.argv[1:] if each != "unseen"] or sorted(set(vendors.values()))
    records = [each for each in records if vendors.get(each["cluster"]["chip"]) in chosen]
    if "unseen" in sys.argv:
        records = [each for each in records if each.get("unseen")]
    for file in (Path(each) for each in chosen if each.endswith(".jsonl")):
        records += [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    grouped = defaultdict[tuple[str, str], list[float]](list)
    for job, answer in zip(records, api.estimate_jobs(records), strict=True):
        if answer["status"] != "ok":
            print(f"{job['id']}: {answer.get('reason')}")
            continue
        for name, published, predicted, remark in figures(job, answer):
            ratio = predicted / published
            if group := job.get("group"):
                grouped[f"{group}, {job['serve']['engine']}", name].append(ratio)
            else:
                values = (f"{float(f'{each:.4g}'):,g}" for each in (published, predicted))
                print(f"{job['id']}: {f' {name}, predicted '.join(values)} ({ratio:.2f}{remark})")
    if grouped:
        print("| points | figure | number | predicted / published | error | within 25% | above 2x |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
    for (group, name), values in sorted(grouped.items()):
        errors = [abs(each - 1) for each in values]
        near, far = sum(each <= 0.25 for each in errors), sum(not 0.5 <= each <= 2 for each in values)
        row = f"{median(values):.2f} | {median(errors):.0%} | {near / len(values):.0%} | {far}"
        print(f"| {group} | {name} | {len(values)} | {row} |")


if __name__ == "__main__":
    main()
