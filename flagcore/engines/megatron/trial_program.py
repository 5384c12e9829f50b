"""What flagcore's own trial program can run here, and the job that it reads."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.spec import SettingValue, TrainSpec
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.engines.megatron.options import DEFAULTS, runs
from flagcore.engines.megatron.predict import with_layout
from flagcore.engines.megatron.stages import LAYOUT
from flagcore.errors import SpecError
from flagcore.i18n import _

MODULES = {"torch": "torch", "megatron.core": "megatron-core>=0.12"}
"""What trials import, and the pip requirement that brings it."""
SEED = 1234
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
PRECISIONS = ("bf16", "fp16", "fp32")
EIGHT_BITS = ("fp8", "mxfp8")
SETTINGS = (
    "recompute_modules",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    LAYOUT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "accumulate_allreduce_grads_in_fp32",
    "grad_reduce_in_bf16",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_p2p_comm",
    "cross_entropy_loss_fusion",
)
"""Settings that the trial program takes."""
OF_TRANSFORMER_ENGINE = (
    "tp_comm_overlap",
    "moe_grouped_gemm",
    "fp8_recipe",
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Settings that it takes with transformer-engine's layers, kernels and optimizer."""
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
    if key in SETTINGS or (key in OF_TRANSFORMER_ENGINE and layers == TRANSFORMER_ENGINE):
        return True
    if key == "moe_grouped_gemm" and installed("grouped_gemm"):
        return True
    if key in CHOICES:
        return value in CHOICES[key][layers]
    return value in does.get(key, (False, "fp32", "none"))


def installed(module: str) -> bool:
    """Return whether a module is found, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def as_installed(platform: Platform) -> Platform:
    """Return `platform` with transformer-engine's layers where it imports and the spec names none.

    Otherwise the spec stays: the trial program then runs megatron-core's own layers, unfused.
    """
    task, support = platform.task, platform.support
    spec, train = task.spec, task.spec.train
    if train.command is not None or train.implementation is not None or support.device_type in (None, "cpu"):
        return platform
    if not installed("transformer_engine") or not _imports((*support.preload, "transformer_engine.pytorch")):
        return platform
    spec = replace(spec, work=replace(train, implementation=TRANSFORMER_ENGINE))
    return replace(platform, task=replace(task, spec=spec))


def installation_notes(platform: Platform) -> tuple[str, ...]:
    """Return what it means for trials that transformer-engine does not import; nothing on a CPU."""
    train = platform.task.spec.train
    if train.command is not None or train.implementation is not None or platform.support.device_type in (None, "cpu"):
        return ()
    return (
        _(
            "transformer-engine does not import here: trials run megatron-core's own layers, without fused kernels, "
            "FP8 and overlap of tensor-parallel messages; a job with transformer-engine is faster"
        ),
    )


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
        "nodes": len(spec.cluster.hosts) if spec.on_each_host and probe is None else 1,
    }


def _settings(train: TrainSpec) -> dict[str, object]:
    values = {**DEFAULTS[runs(train)], **train.settings}
    taken = {key: values[key] for key in (*SETTINGS, *OF_TRANSFORMER_ENGINE, *CHOICES) if key in values}
    return {
        key: str(value).split(",") if BY_NAME[key].kind in ("words", "ints") else value for key, value in taken.items()
    }


def _threads(platform: Platform) -> int:
    """Return how many threads each rank may use so that together they fill the node's devices, which are cores."""
    group = platform.task.cluster.groups[0]
    return max(1, group.chip.devices_per_node // group.devices_per_node)
