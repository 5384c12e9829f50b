"""Knobs and settings as Megatron-LM's own command-line flags, for a user's launch command, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import SettingValue, TrainSpec
from flagcore.engines.megatron.recompute import recompute_modules
from flagcore.spec.settings import LISTS, SETTINGS, setting_from_text

FLAGS: Mapping[str, str] = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "micro_batch_size": "--micro-batch-size",
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "sequence_parallel": "--sequence-parallel",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "recompute_granularity": "--recompute-granularity",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
}
"""Megatron derives the data-parallel size from the world size, and has no flag for `use_recompute`."""

SPELT_OTHERWISE: Mapping[str, str] = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
"""Flags that are not their setting's name with hyphens."""

_NO_FLAG = (
    "pipeline_schedule",
    "moe_expert_imbalance",
    "moe_recompute_level",
    "recompute_num_layers_per_stage",
    "offload_stages",
    "trainable",
)
"""Settings that are not Megatron-core's."""
_OFF = {
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "accumulate_allreduce_grads_in_fp32": "--grad-reduce-in-bf16",
}
"""What turns off a setting that is on by default."""


def settings_of_command(command: Sequence[str]) -> dict[str, SettingValue]:
    """Return the settings that the flags of a command give. A flag's last mention counts, as for the engine."""
    found: dict[str, SettingValue] = {}
    for place, word in enumerate(command):
        if not word.startswith("--"):
            continue
        flag, _, value = word.partition("=")
        key = SPELT_OTHERWISE.get(flag, flag.removeprefix("--").replace("-", "_"))
        if key not in SETTINGS:
            continue
        values = [value] if value else list(takewhile(lambda each: not each.startswith("--"), command[place + 1 :]))
        found |= setting_from_text(key, "true" if SETTINGS[key][0] is bool else ",".join(values))
    return found


def implementation_of_command(command: Sequence[str]) -> str | None:
    """Return whose layers a command asks for, or None."""
    for place, word in enumerate(command):
        flag, _, value = word.partition("=")
        if flag == "--transformer-impl":
            value = value or "".join(command[place + 1 : place + 2])
            return value if value in ("local", "transformer_engine") else None
    return None


def flags(candidate: Mapping[str, KnobValue], train: TrainSpec, train_iters: int | None) -> list[str]:
    """Return Megatron's flags for a candidate; with `train_iters`, those that cut a trial short."""
    result = ["--seq-length", str(train.seq_length), "--global-batch-size", str(train.global_batch_size)]
    for knob, flag in FLAGS.items():
        value = candidate.get(knob)
        if value is True:
            result.append(flag)
        elif value is not None and value is not False:
            result += [flag, str(value)]
    result += _setting_flags(train)
    if train_iters is not None:
        result += ["--train-iters", str(train_iters), "--log-interval", "1"]
    return result


def expand(
    command: Sequence[str], candidate: Mapping[str, KnobValue], given: Sequence[str], folder: str
) -> tuple[str, ...]:
    """Return the user's command with its placeholders filled in.

    `{flags}` as an argument of its own becomes the flags; without it they go to the end. `{folder}` and
    `{a_knob}` inside an argument become the trial's folder and the knob's value. Other braces stay.
    """
    values = {f"{{{knob}}}": "" if value is None else str(value) for knob, value in candidate.items()}
    values["{folder}"] = folder
    argv: list[str] = []
    for argument in command:
        if argument == "{flags}":
            argv += given
            continue
        for placeholder, value in values.items():
            argument = argument.replace(placeholder, value)
        argv.append(argument)
    return tuple(argv if "{flags}" in command else [*argv, *given])


def _setting_flags(train: TrainSpec) -> list[str]:
    """Return the flags of the spec's settings that its own command does not have."""
    has, spelt = settings_of_command(train.command or ()), {key: flag for flag, key in SPELT_OTHERWISE.items()}
    result: list[str] = []
    settings = dict(train.settings)
    if settings.get("moe_recompute_level"):
        settings["recompute_modules"] = ",".join(sorted(recompute_modules(settings)))
    for key, value in settings.items():
        if key in has or key in _NO_FLAG:
            continue
        flag = spelt.get(key, "--" + key.replace("_", "-"))
        if value is True:
            result.append(flag)
        elif value is False:
            result += [_OFF[key]] if key in _OFF else []
        else:
            result += [flag, *(str(value).split(",") if key in LISTS else [str(value)])]
    return result


def environment(candidate: Mapping[str, KnobValue]) -> dict[str, str]:
    """Return the knobs as environment variables: `FLAGCORE_MICRO_BATCH_SIZE=4`, flags as 1 and 0, None as empty."""
    return {f"FLAGCORE_{knob.upper()}": _text(value) for knob, value in candidate.items()}


def _text(value: KnobValue) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
