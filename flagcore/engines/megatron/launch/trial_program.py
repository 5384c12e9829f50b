"""Checks what flagcore's own trial program can run here, and builds its job."""

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
from flagcore.domain.space import Candidate
from flagcore.domain.spec import AUTO, SettingValue, TrainSpec
from flagcore.engines.megatron.command.user_command import DISTRIBUTION
from flagcore.engines.megatron.mixed.trials import hosts_of, shares
from flagcore.engines.megatron.predict import with_layout
from flagcore.engines.megatron.space.knobs import BY_NAME
from flagcore.engines.megatron.space.options import DEFAULTS, runs
from flagcore.engines.megatron.trial.job import Candidate as JobCandidate
from flagcore.errors import SpecError
from flagcore.i18n import _

MODULES = {"torch": "torch", "megatron.core": "megatron-core>=0.12"}
"""Modules that trials import, and their pip requirements."""
SEED = 1234
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
PRECISIONS = ("bf16", "fp16", "fp32")
EIGHT_BITS = ("fp8", "mxfp8")
ACCEPTED_KEYS = frozenset(field.name for field in fields(JobCandidate))
"""Knobs and settings that the trial program accepts."""
TRANSFORMER_ENGINE_SETTINGS = (
    *("tp_comm_overlap", "moe_grouped_gemm", "fp8_recipe", "use_precision_aware_optimizer"),
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
)
"""Settings that only transformer-engine supports."""
ACCEPTED_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "moe_token_dispatcher_type": dict.fromkeys((LOCAL, TRANSFORMER_ENGINE), ("alltoall", "allgather")),
    "cp_comm_type": {LOCAL: ("all_gather",), TRANSFORMER_ENGINE: ("p2p", "all_gather", "a2a")},
}
"""The only values of settings that the trial program accepts."""


def check(train: TrainSpec) -> None:
    """Raise SpecError for anything that the trial program cannot run with the installed layers."""
    layers = train.implementation or (TRANSFORMER_ENGINE if installed("transformer_engine") else LOCAL)
    precisions = PRECISIONS + (EIGHT_BITS if layers == TRANSFORMER_ENGINE else ())
    requirements = {
        "train.implementation": (layers, layers == LOCAL or installed("transformer_engine"), "install it"),
        "train.precision": (train.precision, train.precision in (AUTO, *precisions), f"use {', '.join(precisions)}"),
        "train.attention": (train.attention, train.attention == "flash", "use flash"),
        **{
            f"train.settings.{key}": (value, trial_runs(key, value, layers), "remove it")
            for key, value in train.settings.items()
        },
    }
    for key, (value, is_met, fix) in requirements.items():
        if not is_met:
            problem = f"is not supported by flagcore's own trial program with {layers} layers"
            raise SpecError(key=key, value=value, problem=problem, fix=f"{fix}, or set a train.command")


def trial_runs(key: str, value: SettingValue, layers: str = LOCAL) -> bool:
    """Return whether the trial program accepts a setting, or runs the same way without it."""
    harmless_values: dict[str, tuple[SettingValue, ...]] = {
        "pipeline_schedule": (value,),
        "moe_expert_imbalance": (value,),
        "trainable": ("all",),
    }
    if key in ACCEPTED_VALUES:
        return value in ACCEPTED_VALUES[key][layers]
    is_harmless = value in harmless_values.get(key, (False, "fp32", "none"))
    if key in TRANSFORMER_ENGINE_SETTINGS and layers != TRANSFORMER_ENGINE:
        return is_harmless or (key == "moe_grouped_gemm" and installed("grouped_gemm"))
    return is_harmless or key in ACCEPTED_KEYS


def installed(module: str, requirement: str = "") -> bool:
    """Return whether a module is installed in a version that `requirement` allows. The module is not imported."""
    try:
        return find_spec(module) is not None and not (requirement and _excluded(Requirement(requirement)))
    except (ImportError, ValueError):
        return False


def _excluded(requirement: Requirement) -> bool:
    try:
        return bool(requirement.specifier) and version(requirement.name) not in requirement.specifier
    except (PackageNotFoundError, InvalidVersion):  # a vendor's build
        return False


def release() -> str | None:
    """Return the installed release of megatron-core, None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(DISTRIBUTION)
    return None


def as_installed(platform: Platform) -> Platform:
    """Return `platform` with transformer-engine's layers if it imports and the spec names no implementation.

    Otherwise the spec stays unchanged: the trial program runs megatron-core's own, unfused layers.
    """
    modules = (*platform.support.preload, "transformer_engine.pytorch")
    if not _chooses_layers(platform) or not installed("transformer_engine") or not _imports(modules):
        return platform
    task = platform.task
    work = replace(task.spec.train, implementation=TRANSFORMER_ENGINE)
    return replace(platform, task=replace(task, spec=replace(task.spec, work=work)))


def installation_notes(platform: Platform) -> tuple[str, ...]:
    """Return a note if transformer-engine does not import on a device that could use it."""
    if not _chooses_layers(platform):
        return ()
    return (
        _(
            "transformer-engine does not import here: trials run megatron-core's own layers, without fused kernels, "
            "FP8 and overlap of tensor-parallel messages; a job with transformer-engine is faster"
        ),
    )


def _chooses_layers(platform: Platform) -> bool:
    """Return whether the spec leaves the layers open on a device that transformer-engine may support."""
    train = platform.task.spec.train
    is_named = train.command is not None or train.implementation is not None
    return not is_named and platform.support.device_type not in (None, "cpu")


@functools.cache
def _imports(modules: tuple[str, ...]) -> bool:
    """Return whether modules import after torch. They may crash in a driver, so another process imports them."""
    try:
        code = f"import torch, {', '.join(modules)}"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


def job(
    platform: Platform, candidate: Candidate, folder: str, probe: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the job of the trial program as plain data; `probe` has the `rank` and the `device` of a probe."""
    task, support = platform.task, platform.support
    spec, train = task.spec, task.spec.train
    return {
        "model": asdict(replace(spec.model, vision=None, windows=None)),
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
        "shares": shares(task, candidate),
        "nodes": len(hosts_of(task, candidate)) if spec.on_each_host and probe is None else 1,
        "end_after_s": spec.control.max_time_per_task,
    }


def _settings(train: TrainSpec) -> dict[str, object]:
    values = {**DEFAULTS[runs(train)], **train.settings}
    return {
        key: str(value).split(",") if BY_NAME[key].kind in ("words", "ints") else value
        for key, value in values.items()
        if key in ACCEPTED_KEYS
    }


def _threads(platform: Platform) -> int:
    """Return the threads of each rank: the node's cores divided by its devices."""
    group = platform.task.cluster.groups[0]
    return max(1, (len(platform.cores) or group.chip.devices_per_node) // group.devices_per_node)
