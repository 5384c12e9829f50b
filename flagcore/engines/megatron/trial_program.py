"""What flagcore's own trial program can run here, and the job that it reads."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.spec import SettingValue, TrainSpec
from flagcore.engines.megatron.command.release import DISTRIBUTION
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.engines.megatron.options import DEFAULTS, runs
from flagcore.engines.megatron.predict import with_layout
from flagcore.engines.megatron.trial.job import Candidate as JobCandidate
from flagcore.errors import SpecError
from flagcore.i18n import _

MODULES = {"torch": "torch", "megatron.core": "megatron-core>=0.12"}
"""What trials import, and the pip requirement that brings it."""
SEED = 1234
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
PRECISIONS = ("bf16", "fp16", "fp32")
EIGHT_BITS = ("fp8", "mxfp8")
TAKEN = frozenset(field.name for field in fields(JobCandidate))
"""Knobs and settings that the trial program takes."""
OF_TRANSFORMER_ENGINE = (
    *("tp_comm_overlap", "moe_grouped_gemm", "fp8_recipe", "use_precision_aware_optimizer"),
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
)
"""Settings of transformer-engine's layers, kernels and optimizer alone."""
CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "moe_token_dispatcher_type": dict.fromkeys((LOCAL, TRANSFORMER_ENGINE), ("alltoall", "allgather")),
    "cp_comm_type": {LOCAL: ("all_gather",), TRANSFORMER_ENGINE: ("p2p", "all_gather", "a2a")},
}
"""Settings of which it takes some values."""


def check(train: TrainSpec) -> None:
    """Raise SpecError for what the trial program cannot run with the layers that are installed."""
    layers = train.implementation or (TRANSFORMER_ENGINE if installed("transformer_engine") else LOCAL)
    precisions = PRECISIONS + (EIGHT_BITS if layers == TRANSFORMER_ENGINE else ())
    cannot = {
        "train.implementation": (layers, layers == LOCAL or installed("transformer_engine"), "install it"),
        "train.precision": (train.precision, train.precision in precisions, f"use {', '.join(precisions)}"),
        "train.attention": (train.attention, train.attention == "flash", "use flash"),
        **{
            f"train.settings.{key}": (value, trial_runs(key, value, layers), "leave it out")
            for key, value in train.settings.items()
        },
    }
    for key, (value, works, fix) in cannot.items():
        if not works:
            problem = f"is not what flagcore's own trial program can run with the layers of {layers}"
            raise SpecError(key=key, value=value, problem=problem, fix=f"{fix}, or give a train.command")


def trial_runs(key: str, value: SettingValue, layers: str = LOCAL) -> bool:
    """Return whether the trial program takes a setting, or runs the same way without it."""
    does: dict[str, tuple[SettingValue, ...]] = {
        "pipeline_schedule": (value,),
        "moe_expert_imbalance": (value,),
        "trainable": ("all",),
    }
    if key in CHOICES:
        return value in CHOICES[key][layers]
    alike = value in does.get(key, (False, "fp32", "none"))
    if key in OF_TRANSFORMER_ENGINE and layers != TRANSFORMER_ENGINE:
        return alike or (key == "moe_grouped_gemm" and installed("grouped_gemm"))
    return alike or key in TAKEN


def installed(module: str, requirement: str = "") -> bool:
    """Return whether a module is found, without importing it, and no version that its requirement excludes."""
    try:
        return find_spec(module) is not None and not (requirement and _excluded(Requirement(requirement)))
    except (ImportError, ValueError):
        return False


def _excluded(requirement: Requirement) -> bool:
    try:
        return bool(requirement.specifier) and version(requirement.name) not in requirement.specifier
    except (PackageNotFoundError, InvalidVersion):  # a vendor's own
        return False


def release() -> str | None:
    """Return the release of megatron-core that is installed here."""
    with suppress(PackageNotFoundError):
        return version(DISTRIBUTION)
    return None


def as_installed(platform: Platform) -> Platform:
    """Return `platform` with transformer-engine's layers where it imports and the spec names none.

    Otherwise the spec stays: the trial program then runs megatron-core's own layers, unfused.
    """
    modules = (*platform.support.preload, "transformer_engine.pytorch")
    if not _chooses_layers(platform) or not installed("transformer_engine") or not _imports(modules):
        return platform
    task = platform.task
    work = replace(task.spec.train, implementation=TRANSFORMER_ENGINE)
    return replace(platform, task=replace(task, spec=replace(task.spec, work=work)))


def installation_notes(platform: Platform) -> tuple[str, ...]:
    """Return what it means for trials that transformer-engine does not import; nothing on a CPU."""
    if not _chooses_layers(platform):
        return ()
    return (
        _(
            "transformer-engine does not import here: trials run megatron-core's own layers, without fused kernels, "
            "FP8 and overlap of tensor-parallel messages; a job with transformer-engine is faster"
        ),
    )


def _chooses_layers(platform: Platform) -> bool:
    """Return whether the trial program may use transformer-engine's layers or not."""
    train = platform.task.spec.train
    named = train.command is not None or train.implementation is not None
    return not named and platform.support.device_type not in (None, "cpu")


@functools.cache
def _imports(modules: tuple[str, ...]) -> bool:
    """Return whether modules import after torch, in a process of its own: they load drivers, and may crash."""
    try:
        code = f"import torch, {', '.join(modules)}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def job(
    platform: Platform, candidate: Candidate, folder: str, probe: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the job of the trial program as plain data; with `probe`, of one `rank` on one `device`."""
    task, support = platform.task, platform.support
    spec, train = task.spec, task.spec.train
    return {
        "model": asdict(spec.model),
        "train": {
            "seq_length": train.seq_length,
            "global_batch_size": train.global_batch_size,
            "precision": train.precision,
            "train_iters": spec.control.train_iters,
            "seed": SEED,
            "balanced_routing": probe is not None,
            "implementation": train.implementation or LOCAL,
        },
        "candidate": _settings(train) | with_layout(platform, candidate),
        "device": {
            "type": support.device_type,
            "backend": support.distributed_backend,
            "preload": list(support.preload),
            "threads_per_rank": _threads(platform) if support.shared_devices else 1,
        },
        "output": folder,
        "probe": probe,
        "nodes": spec.cluster.nodes if spec.on_each_host and probe is None else 1,
    }


def _settings(train: TrainSpec) -> dict[str, object]:
    values = {**DEFAULTS[runs(train)], **train.settings}
    return {
        key: str(value).split(",") if BY_NAME[key].kind in ("words", "ints") else value
        for key, value in values.items()
        if key in TAKEN
    }


def _threads(platform: Platform) -> int:
    """Return how many threads each rank may use so that together they fill the node's devices, which are cores."""
    group = platform.task.cluster.groups[0]
    return max(1, (len(platform.cores) or group.chip.devices_per_node) // group.devices_per_node)
