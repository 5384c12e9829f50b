"""Compares predictions of wide expert parallelism with published rates (`wide_ep.jsonl`).

Each record is a job with its source, what the source does not say (`assumed`), and the published tokens per second of
a device: of answers if `measured.decode` is given, of prompts if `measured.prefill` is given. For decode instances, the
mean context is the published one, but answers are longer, so that the simulated prefill instances keep up.
"""

import json
from pathlib import Path

from flagcore.api import estimate_jobs

POINTS = Path(__file__).with_suffix(".jsonl")


def rate(job: dict, predicted: dict) -> tuple[float, float]:
    """The published and the predicted tokens per second of a device that prefills or decodes."""
    measured, serve = job["measured"], job["serve"]
    if "decode" in measured:
        return measured["decode"], measured["running"] / predicted["tpot_s"]["p50"]
    return measured["prefill"], predicted["requests_per_s"] * serve["input_len"] / measured["devices"]


def main() -> None:
    jobs = [json.loads(line) for line in POINTS.read_text("utf-8").splitlines()]
    print("| point | published tokens/s | predicted | ratio |\n| --- | --- | --- | --- |")
    for job, predicted in zip(jobs, estimate_jobs(jobs), strict=True):
        if predicted["status"] != "ok":
            print(f"| {job['id']} | | {predicted['reason']} | |")
            continue
        published, found = rate(job, predicted)
        print(f"| {job['id']} | {published:,.0f} | {found:,.0f} | {found / published:.2f} |")


if __name__ == "__main__":
    main()
