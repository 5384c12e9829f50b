"""Compares the published runs that the installed plugins ship with their predictions, one line per run.

python benchmarks/published.py [VENDOR ...]
"""

import sys

from flagcore import api
from flagcore.api.inputs import loaded_plugins


def main() -> None:
    """Print each run of the vendors: measured and predicted seconds per step, and predicted / measured."""
    with loaded_plugins(()) as loaded:
        records = loaded.published_runs()
        vendors = {chip.name: chip.vendor for chip in loaded.chips()}
    chosen = sys.argv[1:] or sorted(set(vendors.values()))
    records = [each for each in records if vendors.get(each["cluster"]["chip"]) in chosen]
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
