"""Converts the command of a server to a spec."""

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from flagcore_importers.programs import strip_dashes
from flagcore_models.public import find_public

from flagcore.domain.chip import USUAL_DEVICES
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret, redact_text
from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import Notes, mapping_of, read_mapping
from flagcore_serving.job import CLIENTS_PER_DEVICE, Load
from flagcore_serving.launch.start import EngineProfile
from flagcore_serving.space.flags import as_words, leaves
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP
from flagcore_serving.space.knobs import CONTEXT, DEFAULT_SPACE, QUANTIZATION, TRANSFER
from flagcore_serving.space.roles import parse_roles
from flagcore_serving.space.rules import check_text

LENGTHS = (
    *("max_model_len", "context_length", "ctx_size"),
    *("kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_scheduled_tokens"),
)
"""Arguments whose value may have a unit, such as 32k. Source: vLLM 0.33 `engine/arg_utils.py`."""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HOSTS = "nnodes"
_PASSES = re.compile("exec|nohup|sudo|time|env|setsid|uv|run")
"""Words in front of a program without effect."""
_NO_TEXT = re.compile("(?i)embed(?!ded)|rerank|(^|/)(bge|gte|e5)-")
"""Names of models that generate no text."""
_MODEL_PLACEHOLDER = re.compile(r"\.\.\.|…|<.*>|\[.*\]|.*(\{\w+\}|\{\{.*\}\}|\$[({].*[)}]|\$\w+|__[A-Z]\w*__).*")
_PLACEHOLDER = re.compile(r"[\w./:-]*(\{\w+\}|\{\{.*\}\}|\$\{\w+\}|\$\w+|__[A-Z]\w*__|\[[A-Za-z]\w+\])[\w./:-]*")
_PATH = re.compile("[^={/]*/[^={]*$")
_PATH_FLAG = re.compile("file|path|dir|template|preset")
_NAME_FLAG = re.compile("-[stnS]|-dmS|--(target|name|container)")
"""Flags of other programs whose value may be the name of a server."""
Pair: TypeAlias = tuple[str, list[str]]
"""A flag, with its dashes, and its values."""


def spec_of_command(
    engine: EngineProfile, start: Start, directory: Path, model: str | None
) -> tuple[dict[str, Any], Sequence[ImportNote]]:
    """Convert a command to the data of a spec, with notes (see `Commands.read`). Raises SpecError."""
    notes = Notes()
    program, words = _program(engine, start, notes)
    is_default = tuple(program) == tuple(engine.program.program)
    flags, version = engine.program.installed_release() if is_default and not start.version else ((), start.version)
    pairs = _with_config(engine, list(_split(engine, words)), start, directory, notes)
    pairs = [*_of_variables(engine, start.envs), *pairs]
    pairs = [*pairs, ("", [model])] if model else _with_model(engine, pairs, notes)
    found = _Arguments(engine, pairs, flags, version, notes)
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
        _add_prefill(engine, data, spec_of_command(engine, start.prefill, directory, path)[0], notes)
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
    if baseline.get("split_mode") in ("row", "tensor"):
        baseline[TP] = max(shares, start.devices or 2)
        notes.note("--split-mode", f"{baseline[TP]} devices: set their number", f"auto_tuner.baseline.{TP}")
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


def _add_prefill(engine: EngineProfile, data: dict[str, Any], other: dict[str, Any], notes: Notes) -> None:
    """Add the servers of the spec `other`, which only prefill, to those of the spec `data`, which only decode."""
    names = {INSTANCES: "", TP: "xtp", PP: "pp", DP: "dp", EP: "ep"}
    baseline = data["auto_tuner"]["baseline"]
    layouts = [{name: each.pop(name, 1) for name in names} for each in (other["auto_tuner"]["baseline"], baseline)]
    kinds = ["".join(f"{text}{layout[name]}" for name, text in names.items()) for layout in layouts]
    clusters = [each["cluster"] for each in (other, data)]
    total = sum(each.get("nodes", 1) * each.get("devices_per_node", 1) for each in clusters)
    is_one_host = total <= USUAL_DEVICES and all(each.get("nodes", 1) == 1 for each in clusters)
    width = total if is_one_host else max(each.get("devices_per_node", 1) for each in clusters)
    data["cluster"] |= {"nodes": -(-total // width), "devices_per_node": width}
    arguments = data["serve"]["engine_args"]
    transfers = next((knob.words for knob in engine.knobs if knob.name == TRANSFER), ())
    for name, value in _without_role(engine, arguments, notes).items():
        if word := next((each for each in transfers[1:] if each in str(value)), ""):  # not the default
            baseline[TRANSFER] = word
        notes.note(f"--{name}", f"dropped ({value}): {PREFILL_DECODE} sets it", PREFILL_DECODE)
    baseline[PREFILL_DECODE] = parse_roles("+".join(kinds), PREFILL_DECODE)
    text = "servers that only prefill or decode: other arguments are those of the servers that decode"
    notes.note(PREFILL_DECODE, text, f"auto_tuner.baseline.{PREFILL_DECODE}")


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
    elif start.instances > 1 and devices <= USUAL_DEVICES:
        each = devices
    elif each is None and devices > USUAL_DEVICES and devices % USUAL_DEVICES == 0:
        each = USUAL_DEVICES
        notes.note(key, f"{USUAL_DEVICES} is assumed: {devices} devices on hosts of usual size", key)
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


def _with_config(engine: EngineProfile, pairs: list[Pair], start: Start, directory: Path, notes: Notes) -> list[Pair]:
    """Return the flags of a command after those in its configuration file, if that is known. Raises SpecError."""
    program = engine.program
    named = [(program.full_name(strip_dashes(flag)), values) for flag, values in pairs if flag]
    found = next((values for name, values in named if values and name == program.config_flag), None)
    if found is None and program.file_variable in start.envs:
        found = [start.envs[program.file_variable]]
    if found is None:
        return pairs
    file, *model = found  # the model may follow the file
    mounted, added, content = start.files.get(file), list[Pair](), dict[str, Any]()
    if mounted is None and os.path.isabs(file) and not os.path.exists(file):  # of a container or another machine
        text = f"{file} is not known here, and its flags are left out: write them into the command"
    else:
        text = f"the flags of {file} are part of the command"
        content = read_mapping(directory / file, file=file) if mounted is None else mapping_of(mounted, file=file)
    notes.note(f"--{program.config_flag}" if program.config_flag else program.file_variable, text, "serve")
    if program.typed_file:
        content = {path: each for key, value in content.items() for path, each in leaves(key, value)}
    for key, value in content.items():
        if value is False and not program.typed_file:
            problem = f"dropped: as in {engine.program.title}, false in a configuration file has no effect"
            notes.note(f"--{key}", problem, "serve")
            continue
        given = [each for each in (value if isinstance(value, list) else [value]) if each is not True]
        added.append(
            (f"--{key}", [json.dumps(each) if isinstance(each, Mapping | bool) else str(each) for each in given])
        )
    first = [pair for pair in [*pairs, ("", model)] if not pair[0] and pair[1]]
    others = (pair for pair in pairs if pair[0])
    return [
        *first,
        *added,
        *(pair for pair in others if program.full_name(strip_dashes(pair[0])) != program.config_flag),
    ]


def _of_variables(engine: EngineProfile, envs: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the flags that variables stand for. Those of the command override them."""
    for name, value in envs.items():
        if (prefix := engine.program.env_prefix) and name.startswith(prefix):
            flag = name.removeprefix(prefix).lower().replace("_", "-")
            yield f"--{engine.program.env_flags.get(flag, flag)}", [value]


class _Arguments:
    """What a command line sets: the model, flags with values (True if none), hosts, and data-parallel ranks per host
    (or 0). Raises SpecError for misspelt flags. `installed_flags`: as in `Program.check`."""

    def __init__(
        self, engine: EngineProfile, pairs: Sequence[Pair], installed_flags: Collection[str], version: str, notes: Notes
    ) -> None:
        self._program, self._version, self._notes = engine.program, version, notes
        self.model: str | None = None
        self.hosts, self.local = 1, 0
        self.values: dict[str, Any] = {}
        self._problems = list[SpecError]()
        for flag, values in pairs:
            self._add(flag, values)
        if self.model and _MODEL_PLACEHOLDER.fullmatch(self.model):
            fix = "write the name or the path of the model in its place, or give it as --model"
            self._problems.insert(0, SpecError(key="model", value=self.model, problem="is a placeholder", fix=fix))
        written, self.values = self.values, self._program.known_args(self.values)
        for name in [name for name in self.values if self._program.knob_of(name)[0] is None]:
            if not self._is_known(name, installed_flags):
                del self.values[name]
                written.pop(name, None)
        if self._problems:
            raise join_errors(self._problems)
        added = {name for name in self.values if name not in (*written, EP)}
        dropped = {name: value for name, value in written.items() if name not in self.values}
        alone = {name: added & {*self._program.known_args({name: value})} for name, value in dropped.items()}
        rest = added.difference(*alone.values())
        for name, own in alone.items():
            text = " and ".join(sorted(own or rest))
            notes.note(
                f"--{name}", f"is replaced with {text}" if text else "dropped: has no effect", "serve.engine_args"
            )

    def _add(self, flag: str, values: list[str]) -> None:
        """Add a flag with its values."""
        name, knob = self._named(flag)
        if self.model is None and knob is not None and len(values) > (knob.kind != "flag"):
            self.model = values.pop()  # the model follows a flag, as in `--enforce-eager MODEL`
        if not flag and len(values) > 1:
            fix = f"write only the model after {' '.join(self._program.commands[0])}"
            raise SpecError(key="model", value=" ".join(values), problem="is several words", fix=fix)
        if not flag or name in self._program.model_flags:
            self.model = values[0] if values else self.model
        elif name in (_HOSTS, self._program.local_flag) and len(values) == 1 and values[0].isdecimal():
            self._count(flag, name, int(values[0]))
        elif reason := self._program.reserved.get(name) or ("secrets are not copied" if is_secret(name) else ""):
            self._notes.note(flag, f"dropped: {reason}", "serve.engine_args")
        elif problem := _problem(flag, name, values):
            self._problems.append(problem)
        elif len(values) > 1 and knob is not None:
            self._notes.note(flag, f"dropped ({' '.join(values)}): a knob has a single value", "serve.engine_args")
        else:
            self.values[name] = _argument(name, values, is_switch=knob is not None and knob.kind == "flag")

    def _count(self, flag: str, name: str, count: int) -> None:
        if name == _HOSTS:
            self.hosts, what = count, "hosts of the cluster"
        else:
            self.local, what = count, "data-parallel ranks per host"
        self._notes.note(flag, f"is the number of {what}", "cluster")

    def _named(self, flag: str) -> tuple[str, Knob | None]:
        """Return the name of a flag, in full, and its knob."""
        name = strip_dashes(flag)
        knob, _ = self._program.knob_of(name)
        if knob is None and flag:
            is_short = not flag.startswith("--")
            name = self._program.full_name(name) if is_short else self._program.unabbreviated(name, self._version)
            knob, _ = self._program.knob_of(name)
            if not is_short and name != strip_dashes(flag):
                self._notes.note(flag, f"is short for --{name}", "serve")
        elif knob is not None and flag[1:2] != "-" and knob.flags:
            name = strip_dashes(knob.flags[0].name)
        return name, knob

    def _is_known(self, name: str, installed_flags: Collection[str]) -> bool:
        """Return whether an argument without a knob is kept. Add a problem or a note for an unknown one."""
        flag, program = as_words({name: True}, has_negation=True)[0], self._program
        found = program.flag_problem(name, installed_flags, self._version)
        if found and not found.removed:
            fix = found.fix.replace("did you mean ", "did you mean --")
            self._problems.append(SpecError(key=flag, problem=found.problem, fix=fix))
        elif found and found.is_certain:
            self._notes.note(flag, f"dropped: {found.problem}; {found.fix}", "serve.engine_args")
            return False
        elif found:
            problem = f"{found.problem}; {found.fix}, or set serve.engine_version to your release"
            self._notes.note(flag, problem, f"serve.engine_args.{name}")
        else:
            for effect in program.effects(name, self.values[name], flag):
                text = f"is passed to the engine, but not predicted: {effect.why}"
                self._notes.note(flag, text, f"serve.engine_args.{name}")
        return True


def _problem(flag: str, name: str, values: Sequence[str]) -> SpecError | None:
    """Return the error for a flag whose value is a placeholder or missing, or None."""
    if unfilled := next(filter(_PLACEHOLDER.fullmatch, values), ""):
        fix = "write its value: give the file after `envsubst`, `helm template` or the like has filled it"
        return SpecError(key=flag, value=unfilled, problem="is a placeholder", fix=fix)
    if not values and name.replace("-", "_") in LENGTHS:
        fix = "write its value, which may be a variable that is not set"
        return SpecError(key=flag, problem="has no value", fix=fix)
    return None


def _argument(name: str, values: Sequence[str], *, is_switch: bool) -> Any:
    """Return the value of an argument, or its list of values."""
    given = [_value(name, each) for each in values] or [True]
    if is_switch and str(given[0]).lower() in ("true", "false", "1", "0"):
        given[0] = str(given[0]).lower() in ("true", "1")
    return given if len(given) > 1 else given[0]


def _with_model(engine: EngineProfile, pairs: list[Pair], notes: Notes) -> list[Pair]:
    """Return the flags of a command, with the model first: if it has no other place, it follows the value of a flag."""
    for flag, values in pairs:
        name = engine.program.full_name(strip_dashes(flag))
        knob, _ = engine.program.knob_of(name)
        if not flag or name in engine.program.model_flags or (knob and len(values) > (knob.kind != "flag")):
            return pairs
    is_path = _PATH.match
    long = [pair for pair in pairs if len(pair[1]) > 1 and is_path(pair[1][-1])]
    last = [pair for pair in pairs[-1:] if any(map(is_path, pair[1])) and not _PATH_FLAG.search(pair[0])]
    if not (long or last):
        return pairs
    flag, values = pair = (long or last)[-1]
    notes.note("model", f"{values[-1]} is not the value of {flag}", "model")
    return [("", values[-1:]), *((flag, values[:-1]) if each is pair else each for each in pairs)]


def _split(engine: EngineProfile, words: Sequence[str]) -> Iterator[Pair]:
    """Yield each flag with its values. Values before the first flag have an empty flag."""
    flag, values = "", list[str]()
    for word in words:
        if not re.match("--?[A-Za-z]", word):
            values.append(word)
            continue
        if flag or values:
            yield from _assigned(engine, flag, values)
        flag, equals, value = word.partition("=")
        if word[1:2] in tuple(engine.program.digit_flags) and word[2:].isdecimal():
            flag, equals, value = word[:2], "=", word[2:]
        values = [value] if equals else []
    if flag or values:
        yield from _assigned(engine, flag, values)


def _assigned(engine: EngineProfile, flag: str, values: list[str]) -> Iterator[Pair]:
    """Yield a flag with its values, or the flags that the values FLAG=VALUE of `Program.set_flag` set."""
    if not flag or strip_dashes(flag) != engine.program.set_flag:
        yield flag, values
        return
    for each in values:
        name, _, value = each.partition("=")
        yield f"--{name}", [value]


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
        for knob in (each for each in engine.knobs if each.name in fixed):
            kept = "all candidates keep it, unless the space lists it"
            text = "the search tries other values" if {*knob.names} & {*DEFAULT_SPACE} else kept
            written = name if name == knob.name else f"{'--' if len(name) > 1 else '-'}{name}"
            effects = [each.why for each in engine.program.effects(knob.name, fixed[knob.name], written)]
            needed = engine.program.needed_package(knob.name, fixed[knob.name], version)
            text += f"; not predicted: {', '.join(effects)}" if effects else ""
            text += f"; {needed}" if needed else ""
            notes.note(written, f"is the baseline; {text}", f"auto_tuner.baseline.{knob.name}")
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


def _weights(model: str | None, directory: Path, notes: Notes) -> str:
    """Return the path of a model's weights, perhaps in Hugging Face's cache, or else `model`, with a note."""
    if not model or (directory / model).exists():
        return os.path.abspath(directory / model) if model else ""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cached = sorted(Path(home, "hub", f"models--{model.replace('/', '--')}", "snapshots").glob("*/config.json"))
    if cached:
        return str(cached[-1].parent)
    if model.startswith(("./", "../")) or not find_public(model):
        notes.note("model", f"{model} is not on this machine: download it, and set its path", "model")
    return model


def _value(name: str, text: str) -> Any:
    """Convert a command-line value to a number if it is one; otherwise return `text`."""
    if re.fullmatch(r"-?(\d+|\d*\.\d+)", text):
        return float(text) if "." in text else int(text)
    return parse_length(text) if name.replace("-", "_") in LENGTHS else text


def parse_length(value: Any) -> Any:
    """Convert `4k` to 4000, `4K` to 4096 and `1.5k` to 1500, as vLLM does. Return other values unchanged."""
    match = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?([kKmMgG])", value) if isinstance(value, str) else None
    if not match or (match[2] and match[3].isupper()):
        return value
    return int(Decimal(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3]])
