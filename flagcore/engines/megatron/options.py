"""From settings, precision and implementation to the options of physics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flagcore.domain.spec import SettingValue, Spec, Task, TrainSpec
from flagcore.engines.megatron.command.user_command import readable_command, release_of
from flagcore.engines.megatron.flags import settings_of_command
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.engines.megatron.parallel.layout import Options
from flagcore.engines.megatron.settings import recompute_modules, words
from flagcore.engines.megatron.stages import EMBEDDING, LAYOUT, LOSS
from flagcore.errors import NotModelled, SpecError
from flagcore.physics.schedules.catalogue import SCHEDULES

Settings = Mapping[str, SettingValue]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
TRIAL, COMMAND = "trial", "command"
DEFAULTS: Mapping[str, Settings] = {
    TRIAL: {"moe_token_dispatcher_type": "alltoall", "cp_comm_type": "all_gather"},
    COMMAND: {"moe_token_dispatcher_type": "allgather"},
}
"""Defaults that differ by what runs: flagcore's own trial program, and Megatron-LM."""


def runs(train: TrainSpec) -> str:
    """Return the runner of a job: flagcore's trial program, or a Megatron-LM command, the user's or a hypothetical
    one."""
    return TRIAL if train.command is None and train.implementation in (None, "local") else COMMAND


def settings_in_force(spec: Spec) -> Settings:
    """Return the defaults, those that a plan assumes, those of a user's own command, and the spec's, which win.

    Raises SpecError where they contradict a command whose arguments cannot be changed.
    """
    train, command = spec.train, settings_of_command(spec)
    for key, value in () if readable_command(spec) else command.items():
        if train.settings.get(key, value) != value:
            raise SpecError(
                key=f"train.settings.{key}",
                value=train.settings[key],
                problem=f"contradicts train.command, which sets {value}",
                fix="remove one of the two",
            )
    return {**DEFAULTS[runs(train)], **train.assumed, **command, **train.settings}


SWITCHES = {
    "account_for_embedding": EMBEDDING,
    "account_for_loss": LOSS,
    "precision_aware_optimizer": "use_precision_aware_optimizer",
    "fsdp": "use_megatron_fsdp",
    "overlap_expert_comm": "overlap_moe_expert_parallel_comm",
    "grouped_gemm": "moe_grouped_gemm",
    "cross_entropy_fusion": "cross_entropy_loss_fusion",
    **{name: name for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "fp8_param_gather")},
}
WIDTHS = {
    "main_grad_bytes": "main_grads_dtype",
    "main_param_bytes": "main_params_dtype",
    "exp_avg_bytes": "exp_avg_dtype",
    "exp_avg_sq_bytes": "exp_avg_sq_dtype",
}
"""Options by the settings that they are taken from."""


def options(task: Task) -> Options:
    """Return the options of a task. Raises SpecError for settings that exclude each other, NotModelled."""
    train, settings = task.spec.train, settings_in_force(task.spec)
    check(task, settings)
    share, offloads = settings.get("optimizer_offload_fraction", 1.0), "fine_grained_activation_offloading"
    taken: dict[str, Any] = {name: bool(settings.get(key)) for name, key in SWITCHES.items()}
    taken |= {name: BYTES[str(settings.get(key, "fp32"))] for name, key in WIDTHS.items()}
    return Options(
        **taken,
        schedule=schedule(settings.get("pipeline_schedule")),
        equal_stages=not takes_layouts(task.spec),
        recompute_modules=recompute_modules(settings),
        recompute_stage_layers=numbers(settings.get("recompute_num_layers_per_stage")),
        grad_bytes=_grad_bytes(precision(train, settings), settings),
        assumed_fp8_gather="fp8_param_gather" in train.assumed,
        optimizer_offload_fraction=float(share or 0.0) if settings.get("optimizer_cpu_offload") else 0.0,
        offload_modules=words(settings.get("offload_modules")) if settings.get(offloads) else frozenset(),
        offload_stages=numbers(settings.get("offload_stages")),
        adapters=settings.get("trainable") == "adapters",
        overlap_p2p_comm=bool(settings.get("overlap_p2p_comm", True)),
        dispatcher=str(settings["moe_token_dispatcher_type"]),
        expert_imbalance=_imbalance(settings),
        cp_comm=str(settings.get("cp_comm_type", "p2p")),
        cuda_graph=_graph(settings),
        dropout=bool(settings.get("attention_dropout") or settings.get("hidden_dropout")),
    )


def release(spec: Spec) -> str | None:
    """Return the release of Megatron that runs a job, if it is known."""
    command = readable_command(spec)
    return release_of(spec, command) if command else spec.train.engine_version


def takes_layouts(spec: Spec) -> bool:
    """Return whether the release that runs a job may have layouts of stages; others number the first and the last."""
    return BY_NAME[LAYOUT].is_available(release(spec))


def precision(train: TrainSpec, settings: Settings) -> str:
    """Return the precision of matrix products: that of the job, or the FP8 that settings ask for beside 16 bits."""
    if train.precision not in ("bf16", "fp16") or not settings.get("fp8_format"):
        return train.precision
    return "mxfp8" if settings.get("fp8_recipe") == "mxfp8" else "fp8"


def check(task: Task, settings: Settings) -> None:
    """Raise SpecError for a setting that Megatron refuses together with the others, for any candidate.

    Sources: megatron-core 0.16 `transformer_config.py`, `optimizer_config.py`; Megatron-LM `arguments.py`.
    """
    modules, model = recompute_modules(settings), task.spec.model
    on = {key for key, value in settings.items() if value not in (False, "fp32", 0, "none")}
    flex = settings.get("moe_token_dispatcher_type") == "flex"
    aware, shared = "use_precision_aware_optimizer", "moe_shared_expert_overlap"
    needs = dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), aware)
    needs |= {
        "optimizer_cpu_offload": aware,
        "delay_wgrad_compute": "overlap_moe_expert_parallel_comm",
        "offload_modules": "fine_grained_activation_offloading",
        "fine_grained_activation_offloading": "offload_modules",
        "moe_pad_expert_input_to_capacity": "moe_expert_capacity_factor",
    }
    for key, other in needs.items():
        if key in on and other not in on:
            raise _refused(key, settings, f"needs {other}")
    wrong = {
        "moe_pad_expert_input_to_capacity": (flex, "does not go with moe_token_dispatcher_type: flex"),
        shared: (settings.get("moe_token_dispatcher_type") != "alltoall", "needs moe_token_dispatcher_type: alltoall"),
        "recompute_modules": (
            ("mla_up_proj" in modules and not model.multi_latent_attention)
            or ("moe_act" in modules and model.num_moe_experts is not None and "moe_grouped_gemm" not in on)
            or ("shared_experts" in modules and shared in on),
            "need: mla_up_proj latent attention, moe_act moe_grouped_gemm, shared_experts no moe_shared_expert_overlap",
        ),
        LAYOUT: (
            bool({EMBEDDING, LOSS, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"} & on),
            "excludes other settings of the split of layers",
        ),
    }
    for key, (is_wrong, problem) in wrong.items():
        if is_wrong and key in on:
            raise _refused(key, settings, problem)


def _refused(key: str, settings: Settings, problem: str) -> SpecError:
    return SpecError(key=f"train.settings.{key}", value=settings.get(key), problem=problem)


def schedule(name: SettingValue) -> str | None:
    """Return the model's name of a pipeline schedule; None is the engine's own. Raises NotModelled."""
    spelt = re.sub(r"^zb-?(?=[hv12])", "zb-", str(name or "1f1b").lower().replace("_", "-"))
    if spelt in ("1f1b", "interleaved", "1f1b-i", "interleaved-1f1b"):
        return None
    if spelt not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise NotModelled(f"train.settings.pipeline_schedule = {name} is not modelled; these are: {known}")
    return spelt


def numbers(text: SettingValue) -> tuple[int, ...]:
    """Return the numbers of a list."""
    return tuple(int(part) for part in str(text).split(",")) if text is not None else ()


def _grad_bytes(precision: str, settings: Settings) -> int:
    """Return the width of gradient buffers: as wide as the weights, but fp32 where these are bf16.

    Source: Megatron-LM `arguments.py`, which turns fp32 accumulation on for bf16 by default.
    """
    if precision == "fp32" or settings.get("accumulate_allreduce_grads_in_fp32"):
        return 4
    fp32 = precision != "fp16" and settings.get("accumulate_allreduce_grads_in_fp32", True)
    return 4 if fp32 and not settings.get("grad_reduce_in_bf16") else 2


def _imbalance(settings: Settings) -> float:
    """Return the load of the busiest expert rank over the mean; a capacity bounds it, and filling up reaches it."""
    load, capacity = float(settings.get("moe_expert_imbalance") or 1.0), settings.get("moe_expert_capacity_factor")
    if not capacity:
        return load
    return float(capacity) if settings.get("moe_pad_expert_input_to_capacity") else min(load, max(1.0, float(capacity)))


def _graph(settings: Settings) -> str:
    scope, kind = words(settings.get("cuda_graph_scope")), settings.get("cuda_graph_impl", "none")
    if kind == "none":
        return ""
    return "iteration" if kind == "full_iteration" or "full_iteration" in scope else "layer"
