"""Measures the overhead of flagcore between two trials, in seconds and relative to a start of the program by hand.

The trial is a user's command that immediately prints three Megatron iterations, so nearly all of the time is
flagcore's. It runs on the small CPU space and on a space of about 100,000 candidates.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from flagcore import api
from flagcore.api.inputs import read_spec

TRIALS = 12
PROGRAM = """
for i in range(1, 4):
    print(f" iteration {i}/ 3 | elapsed time per iteration (ms): {100 + i}.0 | lm loss: 9.0E+00 |")
"""
SPEC = """
model: {{name: bench, num_layers: {layers}, hidden_size: 256, ffn_hidden_size: 704, num_attention_heads: 32,
         vocab_size: 1024}}
cluster: {{chip: cpu, devices_per_node: {devices}, memory_per_device: 80GiB}}
train: {{engine: megatron, seq_length: 4096, global_batch_size: {batch}, precision: bf16,
         command: [{python}, {program}]}}
auto_tuner:
  baseline: {{tensor_model_parallel_size: 2, micro_batch_size: 1}}
  control: {{train_iters: 3, warmup_iters: 1, max_trials: {trials}, repeats: 0}}
"""


def main() -> None:
    """Print one JSON object with the results of both spaces."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        by_hand = _by_hand(program)
        for name, layers, devices, batch in (("small", 8, 2, 16), ("large", 48, 64, 512)):
            spec = Path(folder, f"{name}.yaml")
            text = SPEC.format(
                layers=layers, devices=devices, batch=batch, python=sys.executable, program=program, trials=TRIALS
            )
            spec.write_text(text)
            read_spec(spec)
            figures[name] = _tuned(spec, Path(folder, name), by_hand)
    print(json.dumps({"machine": f"{platform.machine()}, {os.cpu_count()} cores", "by_hand_s": by_hand, **figures}))


def _tuned(spec: Path, run_dir: Path, by_hand: float) -> dict[str, float]:
    ends: list[float] = []

    def note(event: object) -> None:
        if getattr(event, "kind", "") == "trial_finished":
            ends.append(time.monotonic())

    result = api.tune(spec, run_dir=run_dir, on_event=note)
    periods = [later - earlier for earlier, later in pairwise(ends)]
    trials = sorted((*result.plan.trials, *result.plan.repeats), key=lambda trial: trial.number)
    running = [trial.duration_s for trial in trials[1:]]
    between = [period - completed for period, completed in zip(periods, running, strict=True)]
    middle = sorted(between)[len(between) // 2]
    return {
        "candidates": result.plan.counts.candidates,
        "between_two_trials_s": round(middle, 4),
        "worst_s": round(max(between), 4),
        "period_over_by_hand": round(sorted(periods)[len(periods) // 2] / by_hand, 2),
    }


def _by_hand(program: Path) -> float:
    times = []
    for _ in range(TRIALS):
        start = time.monotonic()
        subprocess.run([sys.executable, str(program)], stdout=subprocess.DEVNULL, check=True)
        times.append(time.monotonic() - start)
    return round(sorted(times)[len(times) // 2], 4)


if __name__ == "__main__":
    main()
