"""Starts a trial program: its job file, its launch, and whether what it imports is installed."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flagcore_models.layers import attention_by_size, indexer_of, other_mixers, without_repeats
from packaging.version import InvalidVersion

from flagcore.contracts import Platform
from flagcore.domain.launch import Launch
from flagcore.domain.model import Model
from flagcore.errors import LaunchError

SEED = 1234


def program_launch(job: Mapping[str, object], folder: str, program: str) -> Launch:
    """Write the job file of a trial program, and return its launch. Raises LaunchError if it cannot be written."""
    file = Path(folder, "job.json")
    try:
        file.write_text(json.dumps(job, indent=1), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
    return Launch(argv=(sys.executable, "-m", program, str(file)), folder=folder)


def installed(module: str, requirement: str = "") -> bool:
    """Return whether a module is installed in a version that satisfies `requirement`. The module is not imported."""
    try:
        return find_spec(module) is not None and not (requirement and _excluded(requirement))
    except (ImportError, ValueError):
        return False


def _excluded(requirement: str) -> bool:
    from packaging.requirements import Requirement  # plans do not need it

    needed = Requirement(requirement)
    try:
        return bool(needed.specifier) and version(needed.name) not in needed.specifier
    except (PackageNotFoundError, InvalidVersion):  # a vendor's build may have no valid version
        return False


def missing_layers(model: Model) -> Sequence[str]:
    """Return the kinds of layers of a model that trial programs do not have: all but attention over all tokens or a
    window, each before a feed-forward network."""
    found = [mixer.label for mixer in other_mixers(model)]
    return [
        *found,
        *["sparse attention"] * (indexer_of(model) is not None),
        *["attention of other sizes"] * (len(attention_by_size(model)) > 1 or model.layer_embedding_size > 0),
        *["latent experts"] * bool(model.moe_latent_size),
        *["repeated layers"] * (without_repeats(model) is not model),
        *["multi-token prediction without experts"] * (model.mtp_dense and model.mtp_num_layers > 0),
    ]


def shared_job(platform: Platform, folder: str) -> dict[str, Any]:
    """Return the part of a trial program's job that does not depend on the candidate or on the engine."""
    spec, train, support = platform.task.spec, platform.task.spec.train, platform.support
    group = platform.task.cluster.groups[0]
    cores = len(platform.cores) or group.chip.devices_per_node
    return {
        "model": asdict(replace(spec.model, vision=None, layers=(), unread=())),
        "train": {
            "seq_length": train.seq_length,
            "global_batch_size": train.global_batch_size,
            "precision": train.precision,
            "train_iters": spec.control.train_iters,
            "seed": SEED,
        },
        "device": {
            "type": support.device_type,
            "backend": support.distributed_backend,
            "preload": list(support.preload),
            "threads_per_rank": max(1, cores // group.devices_per_node) if support.shared_devices else 1,
        },
        "output": folder,
        "end_after_s": spec.control.max_time_per_task,
    }
