"""Rules that change a user's arguments so that a trial runs exactly N steps and writes none of the user's files.

Sources: Megatron-LM core_v0.16.0 `training/arguments.py`, `training/training.py`, `core/optimizer_param_scheduler.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Effective: TypeAlias = "Mapping[str, Any]"
"""The values of the user's arguments, by destination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRule:
    """Removes the arguments whose destinations match `dests`, and adds the words `adds`.

    `{steps}` and `{run}` in `adds` are the steps of a trial and the folder of the run. A rule applies if `when` returns
    true, by default if the command has one of its arguments.
    """

    dests: str
    why: str
    adds: tuple[str, ...] = ()
    when: Callable[[Effective], bool] | None = None

    def applies(self, effective: Effective) -> bool:
        """Return whether the rule changes a command with these arguments."""
        return self.when(effective) if self.when else any(map(self.matches, effective))

    def matches(self, dest: str) -> bool:
        """Return whether the rule removes a destination."""
        return re.fullmatch(self.dests, dest) is not None


def _always(effective: Effective) -> bool:
    return True


STEPS = "a trial runs {steps} steps"
SCHEDULE = "the learning-rate schedule must fit {steps} steps"
NO_EVALUATION = "a trial does not evaluate"
NO_EXIT = "a trial ends after its steps"
NO_CHECKPOINTS = "a trial reads and writes no checkpoints"
NO_LOGS = "a trial does not write your logs"
NO_PROFILES = "profiling takes time and writes files"
NO_MONITORS = "monitors take time and may restart ranks"

RULES = (
    TrialRule(
        dests="train_iters|train_samples|phase_transition_iterations|iterations_to_skip|skip_(iters|samples)_range",
        why=STEPS,
        adds=("--train-iters", "{steps}"),
        when=_always,
    ),
    TrialRule(dests="rampup_batch_size|step_batch_size_schedule", why="a trial runs full batches"),
    TrialRule(dests="lr_(decay|warmup)_(iters|samples|fraction)|lr_decay_stablelm2_.*", why=SCHEDULE),
    TrialRule(dests="lr_wsd_decay_(iters|samples)", why=SCHEDULE, adds=("--lr-wsd-decay-iters", "1")),
    TrialRule(
        dests="initial_loss_scale",
        why="fp16 skips steps until its loss scale fits",
        adds=("--initial-loss-scale", "4096"),
        when=lambda effective: bool(effective.get("fp16")) and not effective.get("loss_scale"),
    ),
    TrialRule(
        dests="eval_(iters|.*_batch_size)|full_validation|multiple_validation_sets|start_eval_at_iter|extra_(eval|valid)_.*",
        why=NO_EVALUATION,
        adds=("--eval-iters", "0"),
        when=_always,
    ),
    TrialRule(
        dests="eval_interval",
        why=NO_EVALUATION,
        adds=("--eval-interval", "{steps}"),
        when=lambda effective: "eval_interval" not in effective,
    ),
    TrialRule(dests="skip_train|test_mode", why=STEPS),
    TrialRule(dests="exit_(interval|duration_in_mins|on_missing_checkpoint|signal.*)", why=NO_EXIT),
    TrialRule(
        dests="save|save_.*|no_save_.*|.*_save|.*_save_interval|async_.*save|load|pretrained_checkpoint|finetune|no_load_.*"
        "|ckpt_(step|convert_.*)|override_ckpt_iteration|non_persistent_.*|replication.*|use_persistent_ckpt_worker"
        "|auto_detect_ckpt_format|(use|override)_(checkpoint_)?opt_param_scheduler|(bert|ict)_load|log_progress"
        "|use_(mp_args_from_)?checkpoint_args|load_main_params_from_ckpt",
        why=NO_CHECKPOINTS,
    ),
    TrialRule(
        dests="tensorboard_dir|wandb_.*|mlflow_.*|one_logger_.*|config_logger_dir|logits_save_.*|rl_profile_dir"
        "|dump_param_to_param_group_map|moe_routing_trace_.*|flight_recorder_.*",
        why=NO_LOGS,
    ),
    TrialRule(
        dests="enable_one_logger",
        why=NO_LOGS,
        adds=("--no-one-logger",),
        when=_always,
    ),
    TrialRule(
        dests="profile|profile_.*|use_pytorch_profiler|pytorch_profiler_.*|record_memory_history|memory_snapshot_path"
        "|nvtx_ranges|rl_profile|record_shapes",
        why=NO_PROFILES,
    ),
    TrialRule(
        dests="(disable_)?log_straggler|straggler_.*|disable_straggler_.*|enable_ft_package|calc_ft_timeouts|ft_.*"
        "|inprocess_.*|run_workload_inspector_server|error_injection_.*",
        why=NO_MONITORS,
    ),
    TrialRule(
        dests="log_interval",
        why="step times are read from the log",
        adds=("--log-interval", "1"),
        when=_always,
    ),
    TrialRule(dests="auto_tune", why="memory is logged after each step", adds=("--auto-tune",), when=_always),
    TrialRule(
        dests="data_cache_path",
        why="the run has its own index files of the data",
        adds=("--data-cache-path", "{run}/data-cache"),
        when=lambda effective: "data_cache_path" in effective or not effective.get("mock_data"),
    ),
)
"""The rules in the order of application. Arguments that a release does not support are not added."""

EQUIVALENT_ARGUMENTS = {
    "num_layers_per_virtual_pipeline_stage": (
        "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size",
    ),
    "recompute_granularity": ("recompute_activations", "checkpoint_activations"),
}
"""Arguments that are equivalent to a knob."""
