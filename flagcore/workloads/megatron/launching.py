"""How a candidate is started: flagcore's trial program, or the user's own command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError
from flagcore.workloads.megatron.flags import environment, expand, flags

PROGRAM = "flagcore.workloads.megatron.trial"
SEED = 1234


def launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool) -> Launch:
    """Return how to start `candidate`; the trial program's job is written into `folder`.

    Raises LaunchError if that cannot be done.
    """
    spec, values = platform.task.spec, candidate.as_dict()
    if spec.train.command is not None:
        given = flags(values, spec.train, None if for_real else spec.control.train_iters)
        argv = expand(spec.train.command, values, given, folder)
        return Launch(argv=argv, folder=folder, environment=environment(values), directory=os.getcwd())
    file = Path(folder, "job.json")
    try:
        file.write_text(json.dumps(job(platform, candidate, folder), indent=1), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
    return Launch(argv=(sys.executable, "-m", PROGRAM, str(file)), folder=folder)


def job(platform: Platform, candidate: Candidate, folder: str) -> dict[str, object]:
    """Return the job of the trial program as plain data."""
    task, support = platform.task, platform.support
    spec, train = task.spec, task.spec.train
    return {
        "model": {name: value for name, value in asdict(spec.model).items() if name != "name"},
        "train": {
            "seq_length": train.seq_length,
            "global_batch_size": train.global_batch_size,
            "precision": train.precision,
            "train_iters": spec.control.train_iters,
            "seed": SEED,
        },
        "candidate": candidate.as_dict(),
        "device": {
            "type": support.device_type,
            "backend": support.distributed_backend,
            "preload": list(support.preload),
            "threads_per_rank": _threads(task.cluster.devices) if support.shared_devices else 1,
        },
        "output": folder,
    }


def _threads(processes: int) -> int:
    """Return how many threads each of `processes` may use so that together they fill the cores they may run on."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
