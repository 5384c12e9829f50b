"""Knobs and settings as Megatron-LM's own command-line flags, for a user's launch command, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile

from flagcore.domain.knob import Flag
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import SettingValue, Spec
from flagcore.engines.megatron.command.user_command import readable_command
from flagcore.engines.megatron.layers.stages import FIRST, LAST, LAYOUT, VIRTUAL_STAGES
from flagcore.engines.megatron.space.knobs import BY_NAME, SPACE_KNOBS
from flagcore.engines.megatron.space.settings import SETTINGS, recompute_modules
from flagcore.spec.knobs import setting_from_text

SETTINGS_BY_FLAG = {
    flag.name: (knob, flag.word)
    for knob in SETTINGS
    for flag in (*knob.flags, Flag(name="" if knob.flags else knob.name.replace("_", "-")))
    if flag.name
}
"""Each setting by its flag, with the value that the flag sets if it takes none.

Settings without a Megatron flag have their name as a flag, which a user's own program may take.
"""


def settings_of_command(spec: Spec) -> dict[str, SettingValue]:
    """Return the settings that the flags of `train.command` set. The last value of a repeated flag counts."""
    return dict(_parse_settings(tuple(_arguments(spec))))


@lru_cache(maxsize=64)
def _parse_settings(command: tuple[str, ...]) -> Mapping[str, SettingValue]:
    settings: dict[str, SettingValue] = {}
    for flag, values in _parse_flags(command):
        if flag in SETTINGS_BY_FLAG:
            knob, word = SETTINGS_BY_FLAG[flag]
            text = "true" if knob.kind == "flag" else word or ",".join(values)
            settings |= setting_from_text(knob.name, text, SETTINGS)
    return settings


def implementation_of_command(spec: Spec) -> str | None:
    """Return the `--transformer-impl` of `train.command`, None if it has no valid one."""
    for flag, values in _parse_flags(_arguments(spec)):
        if flag == "transformer-impl":
            return values[0] if values[:1] in (["local"], ["transformer_engine"]) else None
    return None


def _arguments(spec: Spec) -> Sequence[str]:
    """Return the arguments of the program that `train.command` starts, or the whole command if it cannot be parsed."""
    command = readable_command(spec)
    return command.arguments if command else spec.train.command or ()


def _parse_flags(command: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a command, without dashes, and its values."""
    for index, word in enumerate(command):
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            rest = takewhile(lambda each: not each.startswith("--"), command[index + 1 :])
            yield flag.replace("_", "-"), [value] if value else list(rest)


def flags(candidate: Mapping[str, KnobValue], spec: Spec, train_iters: int | None) -> list[str]:
    """Return Megatron's flags for a candidate; `train_iters` limits the steps of a trial."""
    train = spec.train
    result = ["--seq-length", str(train.seq_length), "--global-batch-size", str(train.global_batch_size), *train.flags]
    for knob in SPACE_KNOBS:
        result += knob.arguments(candidate.get(knob.name), train.engine_version)
    for name in (LAYOUT, FIRST, LAST, VIRTUAL_STAGES):
        result += BY_NAME[name].arguments(candidate.get(name), train.engine_version)
    result += _setting_flags(spec)
    if train_iters is not None:
        result += ["--train-iters", str(train_iters), "--log-interval", "1"]
    return result


def expand_command(
    command: Sequence[str], candidate: Mapping[str, KnobValue], arguments: Sequence[str], folder: str
) -> tuple[str, ...]:
    """Return the user's command with its placeholders replaced.

    An argument `{flags}` is replaced by the flags; without it they are appended. `{folder}` and `{KNOB}` inside an
    argument are replaced by the trial's folder and the knob's value. Other braces stay.
    """
    values = {f"{{{knob}}}": "" if value is None else str(value) for knob, value in candidate.items()}
    values["{folder}"] = folder
    argv: list[str] = []
    for argument in command:
        if argument == "{flags}":
            argv += arguments
            continue
        for placeholder, value in values.items():
            argument = argument.replace(placeholder, value)
        argv.append(argument)
    return tuple(argv if "{flags}" in command else [*argv, *arguments])


def _setting_flags(spec: Spec) -> list[str]:
    """Return the flags of the spec's settings that the user's command lacks or that override those in it."""
    command_settings = {} if readable_command(spec) else settings_of_command(spec)
    settings = dict(spec.train.settings)
    if settings.get("moe_recompute_level"):
        settings["recompute_modules"] = ",".join(sorted(recompute_modules(settings)))
    if {**command_settings, **settings}.get("moe_token_dispatcher_type") == "flex":
        settings.setdefault("moe_flex_dispatcher_backend", "deepep")  # before 0.16 Megatron has no default
    release = spec.train.engine_version
    flags = [BY_NAME[key].arguments(value, release) for key, value in settings.items() if key not in command_settings]
    if settings.get("use_megatron_fsdp") and "--data-parallel-sharding-strategy" not in _arguments(spec):
        flags.append(("--data-parallel-sharding-strategy", "optim_grads_params"))  # before 0.18 the default is no_shard
    return [word for each in flags for word in each]


def environment(candidate: Mapping[str, KnobValue]) -> dict[str, str]:
    """Return the knobs as environment variables (`FLAGCORE_MICRO_BATCH_SIZE=4`); switches are 1 or 0, None is empty."""
    return {f"FLAGCORE_{knob.upper()}": _variable_text(value) for knob, value in candidate.items()}


def _variable_text(value: KnobValue) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
