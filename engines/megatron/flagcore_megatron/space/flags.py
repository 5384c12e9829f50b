"""Converts knobs and settings to the flags of a release of Megatron-LM, and back."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from flagcore_training.commands import parse_flags
from pydantic import ValidationError

from flagcore.domain.knob import Flag, Knob, in_versions
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import SettingValue, Spec
from flagcore.spec.knobs import settings_of, settings_section
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_megatron.program.user_command import program_arguments, readable_command
from flagcore_megatron.space.knobs import BY_NAME, SETTINGS, SPACE_KNOBS
from flagcore_megatron.space.stages import FIRST, LAST, LAYOUT, PATTERN, VIRTUAL_STAGES

SETTINGS_BY_FLAG = {
    flag.name: (knob, flag.word)
    for knob in SETTINGS
    for flag in (*knob.flags, Flag(name="" if knob.flags else knob.name.replace("_", "-")))
    if flag.name
}
"""Each setting by its flag, with the value that the flag sets if the flag has no value of its own.

If a setting has no Megatron flag, its name is used as the flag, which a user's own program may accept."""


WORDS = {
    "alltoall_seq": "alltoall",
    "kvallgather_cp_algo": "all_gather",
    "megatron_cp_algo": "p2p",
    "ulysses_cp_algo": "a2a",
}
"""Values of MindSpeed-LLM's arguments (@c77308a1), and those of Megatron-LM's settings that mean the same. Megatron-LM
itself had the first before 0.13."""


def settings_of_command(spec: Spec) -> dict[str, SettingValue]:
    """Return the settings that the flags of `train.command` set. If a flag is repeated, its last value is used."""
    return dict(parse_settings(tuple(program_arguments(spec))))


@lru_cache(maxsize=64)
def parse_settings(command: tuple[str, ...]) -> Mapping[str, SettingValue]:
    """Return the settings that the flags of a command set."""
    settings: dict[str, SettingValue] = {}
    for flag, values in parse_flags(command):
        if flag == "num-layer-list" and all(each.isdecimal() for each in ",".join(values).split(",")):
            settings[LAYOUT] = _layout_of(",".join(values), dict(parse_flags(command)).get("mtp-num-layers", []))
        elif flag in SETTINGS_BY_FLAG:
            knob, word = SETTINGS_BY_FLAG[flag]
            text = "true" if knob.kind == "flag" else word or ",".join(WORDS.get(each, each) for each in values)
            settings |= setting_from_text(knob.name, text)
    return settings


def _layout_of(layers: str, depths: Sequence[str]) -> str:
    """Return the layout with the layers of each stage as in `15,15,16,15`, and the depths of multi-token prediction.

    Source: MindSpeed-LLM @c77308a1 `core/transformer/transformer_block.py`, get_num_layers_to_build.
    """
    return f"E{'|'.join(f't*{each}' for each in layers.split(','))}m*{(*depths, '0')[0]}L"


def flags(candidate: Mapping[str, KnobValue], spec: Spec, train_iters: int | None) -> list[str]:
    """Return Megatron's flags for a candidate. `train_iters` is the number of steps of a trial."""
    train = spec.train
    result = ["--seq-length", str(train.seq_length), "--global-batch-size", str(train.global_batch_size), *train.flags]
    for knob in SPACE_KNOBS:
        result += knob.arguments(candidate.get(knob.name), train.engine_version)
    for name in (LAYOUT, PATTERN, FIRST, LAST, VIRTUAL_STAGES):
        result += BY_NAME[name].arguments(candidate.get(name), train.engine_version)
    result += _setting_flags(spec, candidate)
    if train_iters is not None:
        result += ["--train-iters", str(train_iters), "--log-interval", "1"]
    return result


def _setting_flags(spec: Spec, candidate: Mapping[str, KnobValue]) -> list[str]:
    """Return flags for the settings in the spec that the user's command does not contain, or sets to other values.

    The hybrid pattern of a candidate replaces that of the spec.
    """
    command_settings = {} if readable_command(spec) else settings_of_command(spec)
    settings = {key: value for key, value in spec.train.settings.items() if key != PATTERN or not candidate.get(key)}
    if {**command_settings, **settings}.get("moe_token_dispatcher_type") == "flex":
        settings.setdefault("moe_flex_dispatcher_backend", "deepep")  # Megatron has no default before 0.16
    release = spec.train.engine_version
    flags = [BY_NAME[key].arguments(value, release) for key, value in settings.items() if key not in command_settings]
    if settings.get("use_megatron_fsdp"):
        given = {*program_arguments(spec), *spec.train.flags, *(words[0] for words in flags if words)}
        table = release_table(release)
        flags += [words for words in OF_FSDP if words[0] not in given and not table.parse(words)[1]]
    return [word for each in flags for word in each]


OF_FSDP = (("--data-parallel-sharding-strategy", "optim_grads_params"), ("--ckpt-format", "fsdp_dtensor"))
"""What Megatron-FSDP needs beside its switch: the default is no_shard before 0.18, and releases from 0.14 on assert the
format of checkpoints (`validate_args`)."""


ASSERTED = {
    ("cross_entropy_fusion_impl", "te"): (
        ">0.18.0",
        "is refused by Megatron-LM {release}: Transformer Engine cross entropy loss fusion is disabled due to stability"
        " issues",
        "use native, or remove cross_entropy_loss_fusion",
    )
}
"""Values that some releases parse, but assert against: releases, problem and fix.

Source: `validate_args` of core_v0.18.0, core_v0.18.2, core_v0.19.0 and 0.20 @d98e8a64."""


def release_problem(knob: Knob, value: KnobValue | SettingValue, release: str) -> tuple[str, str] | None:
    """Return the problem and the fix for a value that a release does not support. Returns None if it is supported."""
    versions, problem, fix = ASSERTED.get((knob.name, str(value)), ("<0", "", ""))
    if in_versions(versions, release):
        return problem.format(release=release), fix
    spellings = [flag for flag in knob.flags if flag.sets(value)]
    if value is None or value == knob.neutral or not spellings:
        return None
    if words := knob.arguments(value, release):
        table = release_table(release)
        parse_problems = table.parse(words)[1]
        if not parse_problems:
            return None
        choices = ", ".join(map(str, table.by_flag[words[0]].choices)) if words[0] in table.by_flag else ""
        fix = f"use {choices}" if choices else parse_problems[0].fix
        return f"is not a valid value of {words[0]} in Megatron-LM {release}", fix
    releases = [each for each in known_releases() if any(in_versions(flag.versions, each) for flag in spellings)]
    return f"is not supported by Megatron-LM {release}", f"remove it, or use a release among {', '.join(releases)}"


def setting_from_text(name: str, text: str) -> dict[str, SettingValue]:
    """Return the setting `name` with the value in `text`, such as a flag's argument. Empty if the value is invalid."""
    words: dict[str, object] = {"true": True, "false": False, "on": True, "off": False}
    for value in (words.get(text.lower()), _number(text), text):
        if value is not None:
            with suppress(ValidationError):
                return settings_of(settings_section(SETTINGS).model_validate({name: value}), SETTINGS)
    return {}


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None
