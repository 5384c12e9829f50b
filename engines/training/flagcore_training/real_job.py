"""The real job of a user's command: with the values of a candidate, in its words or in copies of its files.

Nothing of the user's is written. Trials do not start the commands of fine-tuning frameworks.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

from flagcore_importers.batch import slurm_options
from flagcore_importers.dialect import SUFFIXES, files_of, flat, name_of, placed, read_config

from flagcore.domain.files import replace as write_file
from flagcore.domain.launch import Launch
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import ClusterSpec, Spec
from flagcore.errors import LaunchError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import dump_yaml
from flagcore_training.commands import PYTHON, STARTERS, with_places, with_processes
from flagcore_training.frameworks import CONFIG, PP, Reading, framework_of, reading

AC, RESHARD, MBS = "activation_checkpointing", "reshard_after_forward", "micro_batch_size"
MEANINGS = {
    **{f"data_parallel_{name}_size": name for name in ("replicate", "shard")},
    AC: "checkpointing",
    RESHARD: "reshard",
}
"""The meanings in `frameworks.yaml` of knobs that have other names."""
CHECKPOINTS = ("none", "full")
"""The values of checkpoints that a switch can set."""
OF_ACCELERATE = re.compile(
    "deepspeed_config|use_deepspeed$|zero_stage$|zero3_|offload_(optimizer|param)_|deepspeed_(hostfile|multinode|moe)"
)
"""The settings with which accelerate starts DeepSpeed itself."""
OF_LAUNCHER = ("--config_file", "--config-file", "--accelerate_config")
"""The options that name a file of accelerate."""


def key_of(read: Reading, name: str) -> str:
    """Return the key of a knob or a meaning: one that is set, or else the framework's first. Empty without one."""
    meaning = MEANINGS.get(name, name)
    names = [each for each in read.keys[meaning].names if "~" not in each] if meaning in read.keys else []
    general = name in ("micro_batch_size", "accumulation", "checkpointing", "deepspeed", AC)
    usual = names if general or read.on_megatron or meaning in read.row["keys"] else []
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

    `given`: the values of knobs, of which None is unset. `own`: those of the command, which stay as they are written.
    `config`: the new configuration of DeepSpeed, if the job has one.
    """
    read = reading(spec)
    values: dict[str, Any] = {name: value for name, value in given.items() if value != own.get(name)}
    values["pipeline_micro_batch" if given.get(PP, 1) != 1 and not read.on_megatron else MBS] = micro_batch_size
    if read.number("global_batch_size"):
        values["global_batch_size"] = spec.train.global_batch_size
    else:
        values["accumulation"] = microbatches
    settings = _of_deepspeed(read, config, folder) if config is not None else {}
    for name, value in values.items():
        key = key_of(read, name)
        if not key or (name == AC and value not in CHECKPOINTS):
            framework = framework_of(read.words)
            text = _("{framework} has no key for {name} = {value}", framework=framework, name=name, value=value)
            raise LaunchError(text)
        if name in (AC, RESHARD):
            value = (value in (True, "full")) != key.startswith("!")
            if isinstance(read.given.get(name_of(key)), str):
                value = "FULL_SHARD" if value else "SHARD_GRAD_OP"
        settings[key.lstrip("!")] = "none" if value is None and name in read.defaults else value
    settings |= {name: number for name, number in _ranks(read, spec.cluster).items() if name in read.given}
    words = on_devices(_changed(read, settings, folder), spec)
    return Launch(argv=words, folder=folder, directory=spec.train.directory)


def on_devices(words: Sequence[str], spec: Spec) -> tuple[str, ...]:
    """Return a command that starts a process on each device of each host. Raises LaunchError."""
    cluster, variables = spec.cluster, list[str]()
    if framework_of(words):
        read = reading(spec)
        ranks = _ranks(read, cluster).items()
        variables = [f"{name.upper()}={number}" for name, number in ranks if name not in read.given]
    words = of_each_host(words, is_started=spec.on_each_host) if cluster.nodes > 1 else words
    if cluster.devices_per_node:
        words = with_processes(words, cluster.nodes, cluster.devices_per_node)
    return (*["env"][: len(variables)], *variables, *words)


def _of_deepspeed(read: Reading, config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of a command with a configuration of DeepSpeed, which is written to a file.

    A program without such a file has a stage. Those of accelerate, which refuses them beside a file (1.15
    `utils/dataclasses.py`, `_deepspeed_config_checks`), are removed.
    """
    if (key := key_of(read, "deepspeed")) in read.row.get("stage", ()):
        zero = config["zero_optimization"]
        if (zero.get("offload_optimizer", {}).get("device") == "cpu") != read.is_on("offloaded_states"):
            raise LaunchError(_("{name} is another than that of {key}", name="offload_optimizer", key="train.command"))
        return {key: zero["stage"]}
    settings: dict[str, Any] = {"deepspeed": write_config(config, Path(folder, "ds_config.json"))}
    settings |= {name: None for name in read.given if OF_ACCELERATE.match(name)}
    if read.given.get("distributed_type") == "DEEPSPEED":
        settings["distributed_type"] = "MULTI_GPU"
    if read.given.get("accelerate_config") in read.row.get("presets", ()):
        settings["accelerate_config"] = "multi_gpu"
    return settings


def _ranks(read: Reading, cluster: ClusterSpec) -> dict[str, int]:
    """Return the keys and variables (in lower case) of hosts and ranks whose numbers are not those of the cluster.

    Raises LaunchError if the command starts one process, and nothing tells it to start more.
    """
    if not cluster.devices_per_node:
        return {}
    total = cluster.nodes * cluster.devices_per_node
    numbers = {"per_node": cluster.devices_per_node, "processes": total, "nodes": cluster.nodes}
    found = dict[str, int]()
    for meaning, number in numbers.items():
        for name, value in read.found(meaning).items():
            text = str(value[0] if isinstance(value, list) and value else value)
            found |= {name: number} if text.isdecimal() and int(text) != number else {}
    is_alone = re.search(read.row.get("alone", "$^"), read.text)
    if read.found("per_node") | read.found("processes") or (is_alone and cluster.devices_per_node == 1):
        return found
    if variable := read.row.get("ranks"):
        forced = [name for name in read.row.get("forced", ()) if cluster.nodes > 1 and name not in read.around]
        return found | {variable: cluster.devices_per_node, **dict.fromkeys(forced, 1)}
    if is_alone:
        text = f"{read.words[0]} starts one process, and the plan has {total} devices"
        raise LaunchError(f"{text}: start the command with accelerate launch, and import it again")
    return found


def _changed(read: Reading, settings: Mapping[str, Any], folder: str) -> tuple[str, ...]:
    """Return the command with other values of keys: in its words if these have the key, else in a copy of a file.

    A value of None removes the key.
    """
    words, directory, left = list(read.words), str(read.directory), {name_of(key): key for key in settings}
    for name, _value, first, end in reversed([*placed(words)]):
        before, equals, _old = words[first].partition("=")
        if name in left:
            text = _text(value := settings[left.pop(name)])
            new = [] if value is None else [f"{before}={text}"] if equals else [before, text]
            words[first : min(end, first + 2)] = new
    files = [each for each in files_of(read.dialect, words, read.directory) if each.endswith(SUFFIXES)]
    changes: dict[str, dict[str, Any]] = {file: {} for file in files}
    contents = {file: read_config(file, directory, key="train.command") for file in files}
    names = {file: {name_of(key) for key, _value in flat(content)} for file, content in contents.items()}
    pairs = [(*word.partition("=")[::2], after) for word, after in pairwise([*words, ""])]
    options = {name: value or after for name, value, after in pairs}
    of_program = [each for each in files if each not in map(options.get, OF_LAUNCHER)]
    for name, key in left.items():
        place = next((file for file in files if name in names[file]), of_program[-1] if of_program else "")
        if place:
            changes[place][key] = settings[key]
        elif settings[key] is not None:
            words.append(f"--{key}={_text(settings[key])}")
    for file, values in changes.items():
        if values:
            copy = write_config(changed(contents[file], values), Path(folder, Path(file).name))
            words = [with_config(word, file, copy) for word in words]
    return tuple(words)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with new values of keys. Sections that are missing are added.

    A value of None removes the key. Raises LaunchError if a key is inside a value that is no section.
    """
    result = deepcopy(dict(content))
    for key, value in values.items():
        *sections, last = key.split(".")
        section: Any = result
        for name in sections:
            section = section.get(name, {}) if value is None else section.setdefault(name, {})
            if not isinstance(section, dict):
                raise LaunchError(f"the configuration file has a value at {name}, so {key} cannot be set")
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return result


def of_each_host(words: Sequence[str], *, is_started: bool) -> tuple[str, ...]:
    """Return a command for several hosts with the addresses and the rank of its host in the options of its launcher.

    `is_started`: whether something starts it on each host, so that its own srun is left out. Raises LaunchError if it
    starts each rank, not a launcher of ranks.
    """
    found = list(words)
    place = next((n for n, word in enumerate(words) if STARTERS.fullmatch(Path(word).name)), None)
    if is_started and place is not None:
        _options, rest = slurm_options(words[place + 1 :])
        of_ranks = PYTHON.fullmatch(Path(rest[0]).name) and "torch.distributed.run" not in rest
        if Path(words[place]).name != "srun" or of_ranks:
            text = N_("{program} starts all ranks: give the command of one host, in which torchrun starts its ranks")
            raise LaunchError(_(text, program=words[place]))
        found[place:] = rest
    return with_places(found)


def write_config(content: Mapping[str, Any], path: Path) -> str:
    """Write a configuration file, and return its absolute path. Raises LaunchError."""
    text = json.dumps(content, indent=2) + "\n" if path.suffix == ".json" else dump_yaml(content)
    try:
        write_file(path, text)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror or error}") from None
    return os.path.abspath(path)


def with_config(word: str, config: str, path: str) -> str:
    """Return a word of a command with `path` in place of the configuration file."""
    name, equals, value = word.partition("=")
    if CONFIG in word:
        return word.replace(CONFIG, path)
    return path if word == config else f"{name}={path}" if equals and value == config else word
