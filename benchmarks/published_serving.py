"""Compares predictions of servers with published figures that no parameter was fitted to (`published_serving.jsonl`).

Each record is a job with its source, what the source leaves open (`assumed`), and the published figures. Records were
drawn at random from all points of their groups, except that wide expert parallelism has all. For each group and figure,
the table has the median of predicted / published, the median error, the share within 25%, and the number of errors
above a factor of two.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from flagcore.api import estimate_jobs

POINTS = Path(__file__).with_suffix(".jsonl")


def ratios(job: dict[str, Any], predicted: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name of each published figure, and predicted / published."""
    for name, value in job["measured"].items():
        figure, _, statistic = name.removesuffix("_s").rpartition("_")
        latency = predicted.get(f"{figure}_s")
        yield name, (latency[statistic] if isinstance(latency, dict) else predicted[name]) / value


def main() -> None:
    jobs = [json.loads(line) for line in POINTS.read_text("utf-8").splitlines()]
    found, failed = defaultdict[tuple[str, str], list[float]](list), list[str]()
    for job, predicted in zip(jobs, estimate_jobs(jobs), strict=True):
        if predicted["status"] != "ok":
            failed.append(f"{job['id']}: {predicted['reason']}")
            continue
        for name, ratio in ratios(job, predicted):
            found[f"{job['group']}, {job['serve']['engine']}", name].append(ratio)
    print("| points | figure | number | predicted / published | error | within 25% | above 2x |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (group, name), values in sorted(found.items()):
        errors = [abs(each - 1) for each in values]
        near, far = sum(each <= 0.25 for each in errors), sum(not 0.5 <= each <= 2 for each in values)
        row = f"{median(values):.2f} | {median(errors):.0%} | {near / len(values):.0%} | {far}"
        print(f"| {group} | {name} | {len(values)} | {row} |")
    print("\n".join(failed))


if __name__ == "__main__":
    main()
