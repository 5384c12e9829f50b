"""The program of the toy engine: `python toy_program.py FOLDER` claims to train, in milliseconds.

It reads `job.json` and writes `metrics.json` in its folder. Only the standard library is imported.
"""

import json
import math
import os
import sys
import time
from typing import Any

FAILURES = ("crash", "hang", "invalid", "oom")


def step_seconds(knobs: dict[str, Any], samples: int) -> float:
    """Return the claimed time of a step. A tensor parallelism of 2 with a micro-batch of 2 is best."""
    tensor, pipeline, micro = (
        math.log2(knobs[f"{name}_size"]) for name in ("tensor_model_parallel", "pipeline_model_parallel", "micro_batch")
    )
    work = (1 + 0.5 * abs(micro - 1)) * (1 + 0.3 * abs(tensor - 1)) * (1 + 0.4 * pipeline)
    return 0.0125 * samples * work * (1.3 if knobs["use_recompute"] else 1.0)


def act(does: str) -> None:
    """Fail as a setting says, or go on."""
    if does == "hang":
        time.sleep(600)
    elif does:
        sys.exit({"oom": "out of memory: tried to allocate 1 GiB", "invalid": "invalid: heads"}.get(does, "it broke"))


def main(folder: str) -> None:
    """Claim to run the steps of a trial, or one rank of it."""
    with open(os.path.join(folder, "job.json"), encoding="utf-8") as file:
        job = json.load(file)
    knobs = job["knobs"]
    if job["where"] in ("", f"{knobs['tensor_model_parallel_size']}x{knobs['micro_batch_size']}"):
        act(job["does"])
    with open(os.path.join(folder, "metrics.json"), "w", encoding="utf-8") as file:
        for step in range(job["steps"]):
            time.sleep(job["sleeps"])
            seconds = step_seconds(knobs, job["global_batch_size"]) * (1.001 if step % 2 else 1.0)
            print(json.dumps({"step_s": seconds, "loss": 7.0 - step, "effective": job["effective"]}), file=file)
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1])
