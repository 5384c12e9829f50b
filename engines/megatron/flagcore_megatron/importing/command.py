"""Converts a Megatron-LM command, or a script that starts one, to a spec."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flagcore_models.public import public_models, public_name
from flagcore_training.commands import UserCommand, cluster_of
from flagcore_training.knobs import note_effects

from flagcore.domain.files import read_regular
from flagcore.domain.launch import Start
from flagcore.domain.spec import ImportNote, SettingValue, Spec
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import _
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import Notes, load_json
from flagcore_megatron.importing.arguments import (
    SIZES,
    TABLES,
    Flags,
    baseline_of,
    baseline_problem,
    options,
    shape,
    with_layers,
)
from flagcore_megatron.program.arguments import Argument, ArgumentProblem, ArgumentSpec, release_table
from flagcore_megatron.program.user_command import SETTINGS, detected_release, not_predicted, read_command
from flagcore_megatron.space.flags import parse_settings
from flagcore_megatron.space.knobs import BY_NAME, SPACE_KNOBS, in_space
from flagcore_megatron.space.split import EXPERT_TENSOR, TP
from flagcore_megatron.space.stages import VIRTUAL_STAGES


def spec_of_command(start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
    """Return the data of a spec for a command, with notes (see `Commands.read`). Raises SpecError."""
    command = start.words
    user_command = read_command(command, str(directory), start.envs)
    if user_command is None:
        problem, fix = "starts no Megatron-LM program", "give `torchrun ... pretrain_gpt.py ...` or a script with it"
        raise SpecError(key="command", value=" ".join(command), problem=problem, fix=fix)
    notes = Notes()
    flags = _flags(user_command, notes)
    if not flags.given:
        problem, fix = "has no argument of Megatron-LM: variables are not set, or it is a part", "give all of it"
        raise SpecError(key="command", value=" ".join(user_command.words), problem=problem, fix=fix)
    cluster = cluster_of(user_command, notes, start)
    devices = cluster["nodes"] * (cluster["devices_per_node"] if cluster["devices_per_node"] != "auto" else 1)
    if model:
        section = asdict(model_from(model, base=directory))
        _compare_shapes(flags, section)
    else:
        section = shape(flags, _vocabulary(flags, Path(user_command.directory)))
    baseline = baseline_of(flags, section)
    is_known = cluster["devices_per_node"] != "auto"  # otherwise the baseline is checked when the spec is used
    if devices == 1 and is_known and (devices := _fewest_devices(flags, baseline)) > 1:
        per_node = math.gcd(devices, 8)
        cluster |= {"nodes": devices // per_node, "devices_per_node": per_node}
        notes.note("cluster", "the fewest devices that the sizes need: the command states none; correct it", "cluster")
    sizes = {"seq_length": flags.get("seq_length"), "global_batch_size": _global_batch(flags, baseline, devices)}
    if sizes["seq_length"] is None:
        notes.report("--seq-length", "is missing", fix="add it to the command")
    train = {"engine": "megatron", **sizes, **options(flags), "command": list(command), "directory": str(directory)}
    if notes.problems:
        raise join_errors(notes.problems)
    tuner: dict[str, Any] = {"baseline": baseline}
    settings = {"settings": parse_settings(user_command.arguments)}
    if is_known and (problem := baseline_problem(baseline, {**train, **settings}, section, devices)):
        notes.note("baseline", f"the command cannot run: {problem}; the rule of thumb is used instead", "auto_tuner")
        tuner = {}
    notes.note("command", "runs with other values of the knobs in each trial; all its other arguments stay", "train")
    return {
        "model": model or with_layers(flags, section),
        "cluster": cluster,
        "train": train,
        "auto_tuner": tuner,
    }, notes.notes


def _flags(command: UserCommand, notes: Notes) -> Flags:
    """Return the arguments of a command by name. If an argument is repeated, its last value is used, as in argparse."""
    table = release_table(detected_release(command, {}))
    own = {
        f"--{name.replace('_', '-')}": ArgumentSpec(flags=(), dest=name, type=kind)
        for name, kind in TABLES["of_forks"].items()
    }
    table = replace(table, by_flag={**release_table(None).by_flag, **own, **table.by_flag})  # forks take over others
    words = [new for each in command.arguments for new in _renamed(*each.partition("="))]
    arguments, problems = table.parse(words)
    for problem in problems:
        _note_problem(problem, table.find(problem.flag), notes)
    for each in arguments:
        if each.spec.values == "*" and not each.values:
            notes.note(each.flag, "has no value: a variable of the script may be empty", "train.command")
    return Flags(notes, {each.flag: _value(each) for each in arguments}.items())


def _note_problem(problem: ArgumentProblem, spec: ArgumentSpec | None, notes: Notes) -> None:
    """Note an argument that argparse refuses. Report one without its number; `spec` is that of a known argument."""
    is_empty = problem.problem.startswith("takes one value") and not problem.value
    if spec and is_empty and spec.type in ("int", "float") and "rank" not in problem.flag:
        fix = "write its value, which may be an empty variable of the script"
        notes.report(problem.flag, "has no value", fix=fix)
    name = problem.flag.lstrip("-").replace("_", "-")
    if spec or not name or SETTINGS.unclassed([name]):
        meant = f"; {problem.fix}" if problem.fix.startswith("did you mean") else ""
        notes.note(problem.flag or problem.value, f"{problem.problem}: not in the predictions{meant}", "train.command")
    elif effect := not_predicted({name: (problem.flag, problem.value or True)}):
        note_effects(effect, notes)


NEWER = {
    "--recompute-activations": "--recompute-granularity selective",
    "--num-virtual-stages-per-pipeline-rank": "--virtual-pipeline-model-parallel-size",
}


def read_flags(text: str, spec: Spec) -> tuple[str, dict[str, SettingValue], list[str]]:
    """See `Engine.read_flags`. By default, experts are split like all other matrices."""
    words = [new for each in text.split() for new in _renamed(*each.partition("="))]
    first, *flags = re.split(r"(?:^| )--(?=[a-zA-Z])", " ".join(NEWER.get(word, word) for word in words))
    kept, unused, settings, sizes = [first.strip(" ,")], list[str](), dict[str, SettingValue](), dict[str, int]()
    for each in flags:
        flag, _, value = re.sub(r"[=\s]+", " ", each, count=1).strip(" ,").partition(" ")
        name = flag.replace("-", "_")
        if value.isdecimal():
            sizes[name] = int(value)
        if BY_NAME.get(name) in SPACE_KNOBS or name in spec.space:
            kept.append(f"{name} {value}")
        elif found := parse_settings((f"--{flag}", *value.split())):
            settings |= found
        elif f"--{flag}" in release_table(None).by_flag:
            unused.append(f"--{flag}")
        elif name != VIRTUAL_STAGES:
            kept.append(f"{name} {value}")
    if VIRTUAL_STAGES in sizes:
        kept.append(f"{SIZES[-1]} {in_space(sizes, spec.model).get(SIZES[-1])}")
    if flags and spec.model.experts and EXPERT_TENSOR not in spec.train.settings:
        settings = {EXPERT_TENSOR: sizes.get(TP, 1), **settings}
    return ", ".join(filter(None, kept)), settings, unused


def _renamed(flag: str, equals: str, value: str) -> list[str]:
    """Return the words in place of a word, with the flag of the newest release in place of another name."""
    *before, last = TABLES["renamed"].get(flag, [flag])
    return [*before, f"{last}{equals}{value}"]


def _value(argument: Argument) -> Any:
    """Return the value of an argument, its text if it is a choice of a fork, or None if it is invalid."""
    try:
        return argument.spec.values == 0 or argument.value
    except ValueError:
        return " ".join(argument.values) if argument.spec.choices else None


def _global_batch(flags: Flags, baseline: dict[str, Any], devices: int) -> Any:
    """Return the global batch size: the last one of a schedule. By default it is one micro-batch of each replica."""
    sizes = re.findall(r":(\d+)", str(flags.get("step_batch_size_schedule") or ""))
    if sizes or (size := flags.get("global_batch_size")) is not None:
        return int(sizes[-1]) if sizes else size
    replicas = devices // math.prod(baseline.get(name, 1) for name in SIZES[:3])
    flags.note("global_batch_size", "is missing: as in Megatron, one micro-batch of each replica", "train")
    return baseline["micro_batch_size"] * max(1, replicas)


def _fewest_devices(flags: Flags, baseline: Mapping[str, Any]) -> int:
    """Return the fewest devices on which a job with these sizes can start, or 1 if a size is no number."""
    tensor, stages, context, experts = (baseline.get(name, 1) for name in SIZES[:4])
    numbers = (tensor, stages, context, experts, split := flags.get("expert_tensor_parallel_size", tensor))
    if any(type(each) is not int or each < 1 for each in numbers):
        return 1
    return int(stages) * math.lcm(tensor * context, experts * split if experts > 1 else 1)


def _compare_shapes(flags: Flags, section: dict[str, Any]) -> None:
    """Report an error for each model size in the command that differs from the model `section` of the spec."""
    for name, key in TABLES["shape"].items():
        value = flags.get(name)
        if isinstance(value, int) and value != section.get(key):
            problem = _("differs from --model, which has {n}", n=section.get(key) or "none")
            flags.source.report(flags.key(name), problem, value=value, fix=_("give the model that the command trains"))


def _vocabulary(flags: Flags, directory: Path) -> int | None:
    """Return the vocabulary size from the command or the tokenizer's files, or None and report an error."""
    for name in ("vocab_size", "padded_vocab_size"):
        if isinstance(size := flags.get(name), int):
            return size
    for name, file, keys in (
        ("tokenizer_model", "config.json", ("vocab_size",)),
        ("tokenizer_model", "tokenizer.json", ("model", "vocab")),
        ("vocab_file", "", ()),
    ):
        path = Path(directory, str(flags.get(name)), file)
        if flags.has(name) and os.path.isfile(path) and path.suffix == ".json" and (size := _size_in(path, keys)):
            flags.note("vocab_size", f"{size}, from {path}", "model.vocab_size")
            return size
    for part in [part for name in TABLES["tokenizers"] for part in Path(str(flags.get(name, ""))).parts[:-3:-1]]:
        known = public_name(part.removeprefix("models--").replace("--", "/"))
        if known and (size := public_models()[known].get("vocab_size")):
            flags.note("vocab_size", f"{size}, that of {known}, which the tokenizer's path names", "model.vocab_size")
            return int(size)
    tokenizer = str(flags.get("tokenizer_type", "GPT2BPETokenizer"))  # GPT2BPETokenizer is pretrain_gpt.py's default
    if size := TABLES["vocabularies"].get(tokenizer):
        flags.note("vocab_size", f"{size}, the usual vocabulary of {tokenizer}", "model.vocab_size")
        return int(size)
    if name := _of_shape(flags):
        size = public_models()[name]["vocab_size"]
        flags.note("vocab_size", f"{size}, that of {name}, which has this shape", "model.vocab_size")
        return int(size)
    fix = "add it to the command, or give the model's public name or Hugging Face directory as --model"
    flags.source.report("--vocab-size", "is missing, and the tokenizer's files do not give it", fix=fix)
    return None


def _of_shape(flags: Flags) -> str:
    """Return the public model with the shape of the command, or an empty text if none or different ones have it."""
    sizes: dict[str, str] = TABLES["of_config"]
    wanted = [flags.get(name) for name in sizes]
    if None in wanted[:-1] or flags.has("num_experts"):
        return ""
    wanted[-1] = wanted[-1] or wanted[-2]
    found = dict[object, str]()
    for name, config in public_models().items():
        heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
        if [*(config.get(key) for key in [*sizes.values()][:-1]), heads] == wanted:
            found.setdefault(config.get("vocab_size"), name)
    return next(iter(found.values())) if len(found) == 1 and None not in found else ""


def _size_in(path: Path, keys: Sequence[str]) -> int:
    """Return the number at the nested `keys` of a JSON file, or the length of the object there; 0 if it is missing."""
    try:
        value = load_json(read_regular(path).decode())
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError, SpecError):
        return 0
    return value if isinstance(value, int) else len(value) if isinstance(value, (dict, list)) else 0
