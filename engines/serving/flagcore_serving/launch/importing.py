"""Converts the command of a server to a spec."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import Any

from flagcore_importers.programs import strip_dashes
from flagcore_models.public import find_public

from flagcore.domain.knob import Knob
from flagcore.domain.launch import Start
from flagcore.domain.secrets import redact_text
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import Notes
from flagcore_serving.job import CLIENTS_PER_DEVICE, Load
from flagcore_serving.launch.arguments import Arguments, Pair, of_variables, split, with_config, with_model
from flagcore_serving.launch.start import EngineProfile
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP
from flagcore_serving.space.knobs import CONTEXT, DEFAULT_SPACE, QUANTIZATION, TRANSFER
from flagcore_serving.space.program import Program
from flagcore_serving.space.roles import parse_roles
from flagcore_serving.space.rules import check_text

_PASSES = re.compile("exec|nohup|sudo|time|env|setsid|uv|run")
"""Words in front of a program without effect."""
_NO_TEXT = re.compile("(?i)embed(?!ded)|rerank|(^|/)(bge|gte|e5)-")
"""Names of models that generate no text."""
_NAME_FLAG = re.compile("-[stnS]|-dmS|--(target|name|container)")
"""Flags of other programs whose value may be the name of a server."""


def spec_of_command(
    engine: EngineProfile, start: Start, directory: Path, model: str | None
) -> tuple[dict[str, Any], Sequence[ImportNote]]:
    """Convert a command to the data of a spec, with notes (see `Commands.read`). Raises SpecError."""
    notes = Notes()
    program, words = _program(engine, start, notes)
    is_default = tuple(program) == tuple(engine.program.program)
    flags, version = engine.program.installed_release() if is_default and not start.version else ((), start.version)
    pairs = with_config(engine, list(split(engine, words)), start, directory, notes)
    pairs = [*of_variables(engine, start.envs), *pairs]
    pairs = [*pairs, ("", [model])] if model else with_model(engine, pairs, notes)
    found = Arguments(engine, pairs, flags, version, notes)
    path = model or _weights(found.model, directory, notes)
    check_text(found.values, "--")
    _check_model(engine, path, pairs, program)
    baseline, engine_args = _divide(engine, found.values, version, directory, notes)
    _add_shares(engine, baseline, engine_args, start, notes)
    for effect in engine.program.settings.of_variables(start.envs.items()):
        notes.note(effect.name, f"is not predicted: {effect.why}", f"envs.{effect.name}")
    precision = _precision(engine, path, baseline, engine_args, notes)
    notes.note("serve.profile", "is not in the command: set the lengths and number of your requests", "serve.profile")
    load = {**_lengths(baseline), "concurrency": CLIENTS_PER_DEVICE}
    serve: dict[str, Any] = {"engine": engine.name, "engine_args": engine_args, "profile": load}
    own = [os.path.abspath(directory / each) if "/" in each else each for each in program]
    given = {"precision": precision, "command": [] if is_default else own, "engine_version": start.version}
    serve |= {key: value for key, value in given.items() if value}
    if start.version:
        notes.note("serve.engine_version", "is the tag of the image", "serve.engine_version")
    devices = math.prod(baseline.get(name, 1) for name in (INSTANCES, TP, PP, DP))
    start = _of_one_server(start, devices, found.hosts)
    if start.instances > 1:
        baseline = {INSTANCES: start.instances * baseline.get(INSTANCES, 1), **baseline}
        notes.note("replicas", f"{start.instances}: the instances of the baseline", f"auto_tuner.baseline.{INSTANCES}")
    cluster: dict[str, Any] = {"chip": "auto"}
    devices *= start.instances
    load["concurrency"] *= devices
    if engine_args.pop(engine.program.expert_switch, False):
        baseline[EP] = devices // (baseline.get(PP, 1) * baseline.get(INSTANCES, 1))
    if devices > 1 or engine.split_by == TP:
        cluster |= _cluster(devices, found.hosts, found.local * devices // baseline.get(DP, 1), start, notes)
        baseline = {TP: 1, **baseline}
    data = {"model": path, "cluster": cluster, "serve": serve, "auto_tuner": {"baseline": baseline}}
    if start.prefill:
        prefill = replace(start.prefill, usual_devices=start.usual_devices)
        _add_prefill(engine, data, spec_of_command(engine, prefill, directory, path)[0], start.usual_devices, notes)
    elif half := start.role or role(engine, start.words):
        for name in _without_role(engine, engine_args, notes):
            notes.note(f"--{name}", f"dropped: a {half} half that runs alone transfers nothing", "serve.engine_args")
        notes.note("command", f"is only the {half} half of a pair: give both halves in one file to tune them", "serve")
    return data, notes.notes


def _program(engine: EngineProfile, start: Start, notes: Notes) -> tuple[Sequence[str], Sequence[str]]:
    """Return the program of a command, and its arguments. Raises SpecError if the program is not the engine's."""
    words, place = start.words, _position(engine, start.words)
    if place is None:
        name = " ".join(engine.program.commands[0])
        problem, fix = f"starts no server of {engine.program.title}", f"give a command with `{name}`"
        raise SpecError(key="command", value=" ".join(words), problem=problem, fix=fix)
    front = [*([f"image {start.image}"] if start.image else []), *words[: place[0]]]
    if before := " ".join(each for each in front if not _PASSES.fullmatch(each)):
        notes.note("command", f"is left out in front of the program: {redact_text(before)[:100]}")
    return words[place[0] : place[1]], words[place[1] :]


def _check_model(engine: EngineProfile, path: str, pairs: Sequence[Pair], program: Sequence[str]) -> None:
    """Raise SpecError if a model is missing or generates no text."""
    if _NO_TEXT.search(os.path.join(os.path.basename(os.path.dirname(path)), os.path.basename(path))):
        problem, fix = "generates no text, which flagcore cannot tune", "give the command of a server that does"
        raise SpecError(key="model", value=path, problem=problem, fix=fix)
    if not path.strip("/ "):
        names = ("", *engine.program.model_flags)
        empty = any(strip_dashes(flag) in names and not any(values) for flag, values in pairs)
        problem, fix = "is not in the command", f"write it after {' '.join(program)}, set its variable, or add --model"
        raise SpecError(key="model", problem="is empty: its variable is not set" if empty else problem, fix=fix)


def _add_shares(
    engine: EngineProfile, baseline: dict[str, Any], engine_args: Mapping[str, Any], start: Start, notes: Notes
) -> None:
    """Add the devices of a server that splits matrices, or has a list with the share of each device, to `baseline`."""
    shares = str(engine_args.get(engine.program.share_flag, "")).count(",") + 1
    if {TP, PP} & baseline.keys():
        return
    if (mode := baseline.get("split_mode")) in ("row", "tensor", "layer"):
        knob = engine.split_by if mode == "layer" else TP
        baseline |= {engine.split_by: 1} | {knob: max(shares, start.devices or 2)}
        notes.note("--split-mode", f"{baseline[knob]} devices: set their number", f"auto_tuner.baseline.{knob}")
    elif shares > 1:
        baseline[engine.split_by] = shares


def _precision(
    engine: EngineProfile, path: str, baseline: Mapping[str, Any], engine_args: Mapping[str, Any], notes: Notes
) -> str:
    """Return the precision of weights in another format, or an empty text."""
    formats = (str(each.get(QUANTIZATION)) for each in (baseline, engine_args))
    precision = next(filter(None, map(engine.program.stored.get, formats)), "")
    if precision:
        public = find_public(path)
        precision = public[1] if public and public[1] in ("int8", "int4") else precision
        notes.note(f"--{QUANTIZATION}", f"{precision} is assumed: set the precision of the weights", "serve.precision")
    return precision


def _of_one_server(start: Start, devices: int, hosts: int) -> Start:
    """Return `start` with its instances as hosts if each pod is a host of the same server."""
    is_spread = devices > (start.devices or devices) and devices == start.instances * (start.devices or 0)
    is_one = start.hosts <= 1 and (hosts == start.instances or is_spread)
    return replace(start, instances=1, hosts=start.instances) if is_one else start


def _add_prefill(engine: EngineProfile, data: dict[str, Any], other: dict[str, Any], usual: int, notes: Notes) -> None:
    """Add the servers of the spec `other`, which only prefill, to those of the spec `data`, which only decode.

    `usual`: the devices of a host of usual size.
    """
    names = {INSTANCES: "", TP: "xtp", PP: "pp", DP: "dp", EP: "ep"}
    baseline = data["auto_tuner"]["baseline"]
    layouts = [{name: each.pop(name, 1) for name in names} for each in (other["auto_tuner"]["baseline"], baseline)]
    kinds = ["".join(f"{text}{layout[name]}" for name, text in names.items()) for layout in layouts]
    data["cluster"] |= _common_cluster(usual, *(each["cluster"] for each in (other, data)))
    arguments = data["serve"]["engine_args"]
    transfers = next((knob.words for knob in engine.knobs if knob.name == TRANSFER), ())
    for name, value in _without_role(engine, arguments, notes).items():
        if word := next((each for each in transfers[1:] if each in str(value)), ""):  # not the default
            baseline[TRANSFER] = word
        notes.note(f"--{name}", f"dropped ({value}): {PREFILL_DECODE} sets it", PREFILL_DECODE)
    baseline[PREFILL_DECODE] = parse_roles("+".join(kinds), PREFILL_DECODE)
    text = "servers that only prefill or decode: other arguments are those of the servers that decode"
    notes.note(PREFILL_DECODE, text, f"auto_tuner.baseline.{PREFILL_DECODE}")


def _common_cluster(usual: int, *clusters: Mapping[str, int]) -> dict[str, int]:
    """Return the hosts that have the devices of several clusters. `usual`: the devices of a host of usual size."""
    nodes, widths = ([each.get(name, 1) for each in clusters] for name in ("nodes", "devices_per_node"))
    total = sum(map(mul, nodes, widths))
    width = total if total <= usual and max(nodes) == 1 else max(widths)
    return {"nodes": -(-total // width), "devices_per_node": width}


def _without_role(engine: EngineProfile, arguments: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Remove the flags that only servers of a pair need, with the notes that they are passed. Return the flags."""
    is_of_role = re.compile(engine.program.role_flags).fullmatch
    names = [each for each in arguments if is_of_role(strip_dashes(each).replace("_", "-"))]
    passed = {f"serve.engine_args.{name}" for name in names}
    notes.notes = [each for each in notes.notes if each.at not in passed]
    return {name: arguments.pop(name) for name in names}


def _lengths(baseline: Mapping[str, Any]) -> dict[str, int]:
    """Return the default lengths of prompts and answers, or shorter ones that fit the context in `baseline`."""
    lengths = {"input_len": Load().input_len, "output_len": Load().output_len}
    context, total = baseline.get(CONTEXT), sum(lengths.values())
    limit = context if isinstance(context, int) else 0
    return {name: max(1, each * limit // total) if 0 < limit < total else each for name, each in lengths.items()}


def starts(engine: EngineProfile, command: Sequence[str], directory: str) -> bool:
    """Return whether a command starts the engine's server."""
    return _position(engine, command) is not None


def role(engine: EngineProfile, command: Sequence[str]) -> str:
    """Return `prefill` or `decode` if a command starts a server that does only that; otherwise an empty text."""
    text = " ".join(command)
    return next((name for name, pattern in engine.program.roles.items() if re.search(pattern, text)), "")


def _cluster(devices: int, hosts: int, local: int, start: Start, notes: Notes) -> dict[str, int]:
    """Return the section `cluster` of a spec. `local`: the devices on one host in the command, 0 if unknown."""
    key, each = "cluster.devices_per_node", local or start.devices
    hosts = max(hosts, start.hosts * start.instances if start.hosts > 1 else 1)
    if hosts > 1 and devices % hosts == 0:
        each = devices // hosts
    elif start.instances > 1 and devices <= start.usual_devices:
        each = devices
    elif each is None and devices > start.usual_devices and devices % start.usual_devices == 0:
        each = start.usual_devices
        notes.note(key, f"{each} is assumed: {devices} devices on hosts of usual size", key)
    if each and devices > each and devices % each == 0:
        return {"nodes": devices // each, "devices_per_node": each}
    notes.note(key, "is the number of devices that the command uses", key)
    if start.devices and start.devices > devices:
        text = f"the container or job has {start.devices} devices; set it to let the search use all of them"
        notes.note(key, text, key)
    return {"devices_per_node": devices}


def _position(engine: EngineProfile, words: Sequence[str]) -> tuple[int, int] | None:
    """Return the start and end index of the engine's program in a command, or None if it is not there."""
    for start, word in enumerate(words):
        name, rest = os.path.basename(word), start + 1
        if start and _NAME_FLAG.fullmatch(words[start - 1]):
            continue
        if re.fullmatch(r"python(\d+(\.\d+)*)?", name):
            name = "python"
            while rest < len(words) and re.fullmatch("-[uBEIsSO]+", words[rest]):  # options of the interpreter
                rest += 1
        for pattern in engine.program.commands:
            end = rest + len(pattern) - 1
            found = [name, *map(os.path.basename, words[rest:end])]
            if len(found) == len(pattern) and all(map(re.fullmatch, pattern, found)):
                return start, end
    return None


def _divide(
    engine: EngineProfile, arguments: Mapping[str, Any], version: str, directory: Path, notes: Notes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a command's arguments into a baseline (the values of searched knobs) and all others. Raises SpecError."""
    baseline, others, problems = dict[str, Any](), dict[str, Any](), list[SpecError]()
    for name, value in arguments.items():
        try:
            fixed, rest = engine.program.divided({name: value}, version, "--")
        except SpecError as error:
            fix = "write its value, which may be an empty variable of the script"
            missing = SpecError(key=f"--{name}", problem="has no value", fix=fix)
            problems.append(missing if value is True else error)
            continue
        for knob in engine.knobs:
            if knob.name not in fixed:
                continue
            _note_baseline(engine.program, knob, name, fixed[knob.name], version, notes)
            if isinstance(value, str) and value in knob.spellings and fixed[knob.name] is None:
                fixed[knob.name] = value
        baseline |= fixed
        for key, other in rest.items():
            if engine.program.knob_of(key)[0]:  # a value that is not among the knob's words
                for effect in engine.program.effects(key, other, f"--{key}"):
                    text = f"is passed to the engine, but not predicted: {effect.why}"
                    notes.note(f"--{key}", text, f"serve.engine_args.{key}")
            is_file = isinstance(other, str) and other.startswith(("./", "../"))
            others[key] = os.path.abspath(directory / str(other)) if is_file else other
    if problems:
        raise join_errors(problems)
    return baseline, others


def _note_baseline(program: Program, knob: Knob, name: str, value: KnobValue, version: str, notes: Notes) -> None:
    """Add a note on the flag `name`, whose value is that of a knob in the baseline."""
    kept = "all candidates keep it, unless the space lists it"
    text = "the search tries other values" if knob.layout or {*knob.names} & {*DEFAULT_SPACE} else kept
    written = name if name == knob.name else f"{'--' if len(name) > 1 else '-'}{name}"
    effects = [each.why for each in program.effects(knob.name, value, written)]
    needed = program.needed_package(knob.name, value, version)
    text += f"; not predicted: {', '.join(effects)}" if effects else ""
    text += f"; {needed}" if needed else ""
    notes.note(written, f"is the baseline; {text}", f"auto_tuner.baseline.{knob.name}")


def _weights(model: str | None, directory: Path, notes: Notes) -> str:
    """Return the path of a model's weights, perhaps in Hugging Face's cache, or else `model`, with a note."""
    if not model or os.path.exists(directory / model):
        return os.path.abspath(directory / model) if model else ""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cached = sorted(Path(home, "hub", f"models--{model.replace('/', '--')}", "snapshots").glob("*/config.json"))
    if cached:
        return str(cached[-1].parent)
    if model.startswith(("./", "../")) or not find_public(model):
        notes.note("model", f"{model} is not on this machine: download it, and set its path", "model")
    return model
