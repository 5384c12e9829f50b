"""How a candidate is started: flagcore's trial program, or the user's own command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch
from flagcore.domain.spec import Spec
from flagcore.errors import LaunchError, NoDevice, SpecError
from flagcore.workloads.megatron.flags import environment, expand, flags

PROGRAM = "flagcore.workloads.megatron.trial"
SEED = 1234
PRECISIONS = ("bf16", "fp16", "fp32")


def ready(spec: Spec, modules: Mapping[str, str]) -> None:
    """Raise SpecError or NoDevice unless trials of `spec` can run here; a user's own command brings its own means."""
    train = spec.train
    if train.command is not None:
        return
    cannot = {
        "train.precision": (train.precision, train.precision in PRECISIONS, f"use {', '.join(PRECISIONS)}"),
        "train.attention": (train.attention, train.attention == "flash", "use flash"),
        "train.implementation": (train.implementation, train.implementation in (None, "local"), "leave it out"),
        "cluster.nodes": (spec.cluster.nodes, spec.cluster.nodes == 1, "use 1"),
    }
    for key, (value, works, fix) in cannot.items():
        if not works:
            problem = "is not what flagcore's own trial program can run"
            raise SpecError(key=key, value=value, problem=problem, fix=f"{fix}, or give a train.command")
    missing = [requirement for module, requirement in modules.items() if not installed(module)]
    if missing:
        raise NoDevice(
            f"trials need {' and '.join(missing)}, not installed here; pip install 'flagcore[megatron]', "
            "or give a train.command"
        )


def installed(module: str) -> bool:
    """Return whether `module` can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool) -> Launch:
    """Return how to start `candidate`; the trial program's job is written into `folder`.

    Raises LaunchError if that cannot be done.
    """
    spec, values = platform.task.spec, candidate.as_dict()
    if spec.train.command is not None:
        given = flags(values, spec.train, None if for_real else spec.control.train_iters)
        argv = expand(spec.train.command, values, given, folder)
        return Launch(argv=argv, folder=folder, environment=environment(values), directory=spec.train.directory)
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
            "threads_per_rank": _threads(platform) if support.shared_devices else 1,
        },
        "output": folder,
    }


def _threads(platform: Platform) -> int:
    """Return how many threads each rank may use so that together they fill the node's devices, which are cores."""
    group = platform.task.cluster.groups[0]
    return max(1, group.chip.devices_per_node // group.devices_per_node)
