"""The real job of a fine-tuning framework: the user's own command with the values of a candidate.

Copies of its files of settings have the values, or else its words. Trials do not start such a command.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import SUFFIXES, files_of, flat, name_of, placed, read_config

from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch, Start
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Spec, Task
from flagcore.errors import LaunchError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import package_yaml
from flagcore_trainers import fully_shard as fs
from flagcore_trainers import start
from flagcore_trainers.fully_shard.memory import LOSS_BYTES
from flagcore_trainers.recipes import Reading, framework_of

MEANINGS = {fs.REPLICATE: "replicate", fs.SHARD: "shard", fs.AC: "checkpointing", fs.RESHARD: "reshard"}
"""The meanings in `recipes.yaml` of knobs that have other names."""
CHECKPOINTS = ("none", "full")
"""The values of checkpoints that a switch can set."""
OF_LAUNCHER = ("--config_file", "--config-file", "--accelerate_config")
"""The options that name a file of accelerate."""
DS_CONFIG: Mapping[str, Any] = package_yaml(__package__, "ds_config.yaml")
"""The configuration of DeepSpeed for commands that name none in a file here."""


def kept_framework(spec: Spec) -> str | None:
    """Return the framework whose command a spec keeps for the real job only, or None."""
    words = spec.train.command or ()
    return None if any(start.CONFIG in word for word in words) else framework_of(words)


def reading(spec: Spec) -> Reading:
    """Return the settings of the command of a spec. Raises SpecError."""
    words, directory = spec.train.command or (), Path(spec.train.directory or ".")
    return Reading(framework_of(words) or "", Start(words=words, envs=spec.envs), directory)


def loss_warnings(task: Task) -> list[str]:
    """Return a line if the logits of one sample take LARGE of a device's memory: fused losses need less.

    Liger's fused loss has the logits of as many tokens at once as take about the memory of the hidden states
    (liger-kernel 0.8.5 `ops/backends/_triton/fused_linear_cross_entropy.py`).
    """
    train, facts = task.spec.train, [group.chip.memory_bytes for group in task.cluster.groups]
    memory = min((fact.value for fact in facts if fact), default=math.inf)
    size = (LOSS_BYTES + 2.0) * train.seq_length * task.spec.model.vocab_size
    if size < LARGE * memory:
        return []
    given = reading(task.spec).given if framework_of(train.command or ()) else {}
    on = next((key for key, value in given.items() if "liger" in key and value in (True, "true", "True")), "")
    text = N_(
        "the loss of a sample of {length} tokens takes {size} of {memory} GiB: a fused loss (Liger) needs less, which "
        "is not in the predictions; adapters on 4-bit weights (QLoRA) leave more memory"
    )
    if train.adapter and train.adapter.base == "nf4":
        text = N_(
            "the loss of a sample of {length} tokens takes {size} of {memory} GiB: a fused loss (Liger) needs less, "
            "which is not in the predictions"
        )
    if on:
        text = N_(
            "the loss of a sample of {length} tokens is predicted with {size} of {memory} GiB: with {on}, which is not "
            "in the predictions, it needs less, and larger micro-batches may fit"
        )
    sizes = {"size": f"{size / 2**30:.3g}", "memory": f"{memory / 2**30:.3g}"}
    return [_(text, length=f"{train.seq_length:,}", on=on, **sizes)]


LARGE = 0.2
"""Chosen by hand: from this share of a device's memory on, the logits decide on what fits."""


def ds_config(read: Reading) -> dict[str, Any]:
    """Return the configuration of DeepSpeed of a command, or the usual one if no file here has it."""
    given = read.value("deepspeed")
    if isinstance(given, str) and Path(read.directory, given).is_file():
        return read_config(given, str(read.directory), key="deepspeed")
    inside = {key[10:]: value for key, value in read.given.items() if key.startswith("deepspeed.")}
    return start.changed(DS_CONFIG, inside)


def fixed(read: Reading, knobs: Sequence[Knob], own: Mapping[str, KnobValue]) -> dict[str, tuple[KnobValue, ...]]:
    """Return the values of the knobs that a command cannot set, or not all. `own`: those of the command.

    Weights are shared by the ranks that the other sizes leave.
    """
    found = dict[str, tuple[KnobValue, ...]]()
    for knob in knobs:
        value = own.get(knob.name, knob.neutral)
        if knob.name == fs.AC and value in CHECKPOINTS and _key(read, knob.name):
            found[knob.name] = CHECKPOINTS
        elif knob.name != fs.SHARD and (knob.name == fs.AC or not _key(read, knob.name)):
            found[knob.name] = (value,)
    return found


def _key(read: Reading, name: str) -> str:
    """Return the key of a knob or a meaning: one that is set, or else the framework's first. Empty without one."""
    meaning = MEANINGS.get(name, name)
    names = [each for each in read.keys[meaning].names if "~" not in each] if meaning in read.keys else []
    general = name in ("micro_batch_size", "accumulation", "checkpointing", "deepspeed", fs.AC)
    usual = names if general or meaning in read.row["keys"] else []
    return next((each for each in names if name_of(each) in read.given), next(iter(usual), ""))


def launch(
    spec: Spec,
    folder: str,
    *,
    given: Mapping[str, KnobValue],
    own: Mapping[str, KnobValue],
    micro_batch_size: int,
    microbatches: int,
    config: Mapping[str, Any] | None = None,
) -> Launch:
    """Return the launch of a command with other settings. Raises LaunchError if it has no key for one.

    `given`: the values of knobs. `own`: those of the command, which stay as they are written. `config`: the new
    configuration of DeepSpeed, if the job has one.
    """
    read = reading(spec)
    values: dict[str, Any] = {name: value for name, value in given.items() if value != own.get(name)}
    values["pipeline_micro_batch" if given.get(fs.PP, 1) != 1 else fs.MBS] = micro_batch_size
    if read.number("global_batch_size"):
        values["global_batch_size"] = spec.train.global_batch_size
    else:
        values["accumulation"] = microbatches
    if config is not None:
        path = Path(folder, "ds_config.json")
        values["deepspeed"] = start.write_config(config, path)
    settings = dict[str, Any]()
    for name, value in values.items():
        key = _key(read, name)
        if not key or (name == fs.AC and value not in CHECKPOINTS):
            framework = framework_of(read.words)
            text = _("{framework} has no key for {name} = {value}", framework=framework, name=name, value=value)
            raise LaunchError(text)
        if name in (fs.AC, fs.RESHARD):
            value = (value in (True, "full")) != key.startswith("!")
            if isinstance(read.given.get(name_of(key)), str):
                value = "FULL_SHARD" if value else "SHARD_GRAD_OP"
        settings[key.lstrip("!")] = value
    words = _changed(read, settings, folder)
    words = start.of_each_host(words, is_started=spec.on_each_host) if spec.cluster.nodes > 1 else words
    return Launch(argv=words, folder=folder, directory=spec.train.directory)


def _changed(read: Reading, settings: Mapping[str, Any], folder: str) -> tuple[str, ...]:
    """Return the command with other values of keys: in its words if these have the key, else in a copy of a file."""
    words, directory, left = list(read.words), str(read.directory), {name_of(key): key for key in settings}
    for name, _value, first, end in reversed([*placed(words)]):
        before, equals, _old = words[first].partition("=")
        if name in left:
            text = _text(settings[left.pop(name)])
            words[first : min(end, first + 2)] = [f"{before}={text}"] if equals else [before, text]
    files = [each for each in files_of(read.dialect, words, read.directory) if each.endswith(SUFFIXES)]
    changes: dict[str, dict[str, Any]] = {file: {} for file in files}
    contents = {file: read_config(file, directory, key="train.command") for file in files}
    names = {file: {name_of(key) for key, _value in flat(content)} for file, content in contents.items()}
    options = dict(part for word, after in pairwise([*words, ""]) for part in ((word, after), word.partition("=")[::2]))
    of_program = [each for each in files if each not in map(options.get, OF_LAUNCHER)]
    for name, key in left.items():
        place = next((file for file in files if name in names[file]), of_program[-1] if of_program else "")
        if place:
            changes[place][key] = settings[key]
        else:
            words.append(f"--{key}={_text(settings[key])}")
    for file, values in changes.items():
        if values:
            copy = start.write_config(start.changed(contents[file], values), Path(folder, Path(file).name))
            words = [start.with_config(word, file, copy) for word in words]
    return tuple(words)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
