"""Compares published runs, those that the installed plugins ship and those of job files, with their predictions.

python benchmarks/published.py [VENDOR|FILE.jsonl ...] [unseen]

With `unseen`, only those that no fit has used.
"""

import json
import sys
from pathlib import Path

from flagcore import api
from flagcore.api.inputs import loaded_plugins


def main() -> None:
    """Print each run of the vendors and files: measured and predicted seconds per step, and predicted / measured."""
    with loaded_plugins(()) as loaded:
        records = loaded.published_runs()
        vendors = {chip.name: chip.vendor for chip in loaded.chips()}
    chosen = [each for each in sys.argv[1:] if each != "unseen"] or sorted(set(vendors.values()))
    records = [each for each in records if vendors.get(each["cluster"]["chip"]) in chosen]
    if "unseen" in sys.argv:
        records = [each for each in records if each.get("unseen")]
    for file in (Path(each) for each in chosen if each.endswith(".jsonl")):
        records += [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    for record, answer in zip(records, api.estimate_jobs(records), strict=True):
        measured, step = record["measured"]["step_time_s"], answer.get("step_time_s")
        if step is None:
            print(f"{record['id']}: {answer.get('reason')}")
            continue
        inside = "inside" if step["low"] <= measured <= step["high"] else "outside"
        figures = f"{measured:.4g} s, predicted {step['value']:.4g} s ({step['value'] / measured:.2f}, {inside} 80%)"
        print(f"{record['id']}: {figures}")


if __name__ == "__main__":
    main()
