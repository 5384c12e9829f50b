"""The words of a server's command: its flags with their values, those of its configuration file, and its model."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flagcore_importers.programs import grouped, strip_dashes

from flagcore.domain.knob import Knob
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import Notes, mapping_of, read_mapping
from flagcore_serving.launch.start import EngineProfile
from flagcore_serving.space.hardware import EP
from flagcore_serving.space.knobs import LENGTHS, as_words, leaves, parse_length
from flagcore_serving.space.program import Program

_HOSTS = "nnodes"
_MODEL_PLACEHOLDER = re.compile(r"\.\.\.|…|<.*>|\[.*\]|.*(\{\w+\}|\{\{.*\}\}|\$[({].*[)}]|\$\w+|__[A-Z]\w*__).*")
_PLACEHOLDER = re.compile(r"[\w./:-]*(\{\w+\}|\{\{.*\}\}|\$\{\w+\}|\$\w+|__[A-Z]\w*__|\[[A-Za-z]\w+\])[\w./:-]*")
_PATH = re.compile("[^={/]*/[^={]*$")
_PATH_FLAG = re.compile("file|path|dir|template|preset")
Pair: TypeAlias = tuple[str, list[str]]
"""A flag, with its dashes, and its values."""


def with_config(engine: EngineProfile, pairs: list[Pair], start: Start, directory: Path, notes: Notes) -> list[Pair]:
    """Return the flags of a command after those in its configuration file, if that is known. Raises SpecError."""
    program = engine.program
    own = [pair for pair in pairs if pair[0] and program.full_name(strip_dashes(pair[0])) == program.config_flag]
    named = [values for _flag, values in own if values]
    if program.file_variable in start.envs:
        named.append([start.envs[program.file_variable]])
    if not named:
        return pairs
    file, *model = named[0]  # the model may follow the file
    mounted, content = start.files.get(file), dict[str, Any]()
    if mounted is None and os.path.isabs(file) and not os.path.exists(file):  # of a container or another machine
        text = f"{file} is not known here, and its flags are left out: write them into the command"
    else:
        text = f"the flags of {file} are part of the command"
        content = read_mapping(directory / file, file=file) if mounted is None else mapping_of(mounted, file=file)
    notes.note(f"--{program.config_flag}" if program.config_flag else program.file_variable, text, "serve")
    first = [pair for pair in [*pairs, ("", model)] if not pair[0] and pair[1]]
    return [*first, *_of_file(engine, content, notes), *(pair for pair in pairs if pair[0] and pair not in own)]


def _of_file(engine: EngineProfile, content: Mapping[str, Any], notes: Notes) -> Iterator[Pair]:
    """Yield the flags in a configuration file. A note names those that have no effect there."""
    is_typed = engine.program.typed_file
    if is_typed:
        content = {path: each for key, value in content.items() for path, each in leaves(key, value)}
    for key, value in content.items():
        if value is False and not is_typed:
            problem = f"dropped: as in {engine.program.title}, false in a configuration file has no effect"
            notes.note(f"--{key}", problem, "serve")
            continue
        given = [each for each in (value if isinstance(value, list) else [value]) if each is not True]
        yield f"--{key}", [json.dumps(each) if isinstance(each, Mapping | bool) else str(each) for each in given]


def of_variables(engine: EngineProfile, envs: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the flags that variables stand for. Those of the command override them."""
    for name, value in envs.items():
        if (prefix := engine.program.env_prefix) and name.startswith(prefix):
            flag = name.removeprefix(prefix).lower().replace("_", "-")
            yield f"--{engine.program.env_flags.get(flag, flag)}", [value]


class Arguments:
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
        self._note_replaced(written)

    def _note_replaced(self, written: Mapping[str, Any]) -> None:
        """Add a note on each of the `written` flags that others, or knobs, stand for."""
        added = {name for name in self.values if name not in (*written, EP)}
        dropped = {name: value for name, value in written.items() if name not in self.values}
        alone = {name: {*self._program.known_args({name: value})} for name, value in dropped.items()}
        rest = added.difference(*alone.values())
        for name, own in alone.items():
            text = " and ".join(sorted(added & own or (rest if own else ())))
            effect = f"is replaced with {text}" if text else "dropped: has no effect"
            self._notes.note(f"--{name}", effect, "serve.engine_args")

    def _add(self, flag: str, values: list[str]) -> None:
        """Add a flag with its values."""
        name, knob = self._named(flag)
        if self.model is None and _has_model(knob, values):
            self.model = values.pop()
        if not flag or name in self._program.model_flags:
            self._set_model(values, is_value=bool(flag))
        elif name in (_HOSTS, self._program.local_flag) and len(values) == 1 and values[0].isdecimal():
            self._count(flag, name, int(values[0]))
        elif reason := self._program.reserved.get(name) or ("secrets are not copied" if is_secret(name) else ""):
            self._notes.note(flag, f"dropped: {reason}", "serve.engine_args")
        elif problem := _problem(flag, name, values):
            self._problems.append(problem)
        elif len(values) > 1 and knob is not None:
            self._notes.note(flag, f"dropped ({' '.join(values)}): a knob has a single value", "serve.engine_args")
        else:
            self.values[name] = _argument(
                self._program, name, values, is_switch=knob is not None and knob.kind == "flag"
            )

    def _set_model(self, values: Sequence[str], *, is_value: bool) -> None:
        if len(values) > 1 and not is_value:
            fix = f"write only the model after {' '.join(self._program.commands[0])}"
            raise SpecError(key="model", value=" ".join(values), problem="is several words", fix=fix)
        self.model = values[0] if values else self.model

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
        elif found and (found.is_certain or found.fix == "remove it"):  # the newest release counts
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


def _has_model(knob: Knob | None, values: Sequence[str]) -> bool:
    """Return whether the model follows the flag of a knob and its value, as in `--enforce-eager MODEL`."""
    return knob is not None and len(values) > (knob.kind != "flag")


def _problem(flag: str, name: str, values: Sequence[str]) -> SpecError | None:
    """Return the error for a flag whose value is a placeholder or missing, or None."""
    if unfilled := next(filter(_PLACEHOLDER.fullmatch, values), ""):
        fix = "write its value: give the file after `envsubst`, `helm template` or the like has filled it"
        return SpecError(key=flag, value=unfilled, problem="is a placeholder", fix=fix)
    if not values and name.replace("-", "_") in LENGTHS:
        fix = "write its value, which may be a variable that is not set"
        return SpecError(key=flag, problem="has no value", fix=fix)
    return None


def _argument(program: Program, name: str, values: Sequence[str], *, is_switch: bool) -> Any:
    """Return the value of an argument, or its list of values."""
    given = [_value(program, name, each) for each in values] or [True]
    if is_switch and str(given[0]).lower() in ("true", "false", "1", "0"):
        given[0] = str(given[0]).lower() in ("true", "1")
    return given if len(given) > 1 else given[0]


def with_model(engine: EngineProfile, pairs: list[Pair], notes: Notes) -> list[Pair]:
    """Return the flags of a command, with the model first: if it has no other place, it follows the value of a flag."""
    for flag, values in pairs:
        name = engine.program.full_name(strip_dashes(flag))
        knob, _ = engine.program.knob_of(name)
        if not flag or name in engine.program.model_flags or _has_model(knob, values):
            return pairs
    is_path = _PATH.match
    long = [pair for pair in pairs if len(pair[1]) > 1 and is_path(pair[1][-1])]
    last = [pair for pair in pairs[-1:] if any(map(is_path, pair[1])) and not _PATH_FLAG.search(pair[0])]
    found = long or last
    if not found:
        return pairs
    flag, values = pair = found[-1]
    notes.note("model", f"{values[-1]} is not the value of {flag}", "model")
    return [("", values[-1:]), *((flag, values[:-1]) if each is pair else each for each in pairs)]


def split(engine: EngineProfile, words: Sequence[str]) -> Iterator[Pair]:
    """Yield each flag with its values. Values before the first flag have an empty flag.

    In place of `Program.set_flag`, these are the flags that its values FLAG=VALUE set.
    """

    def parts(word: str) -> tuple[str, str, str]:
        if not re.match("--?[A-Za-z]", word):
            return "", "", ""
        has_digits = word[1:2] in tuple(engine.program.digit_flags) and word[2:].isdecimal()
        return (word[:2], "=", word[2:]) if has_digits else word.partition("=")

    for flag, inline, following, _place in grouped(words, parts):
        values = inline + following
        if flag and strip_dashes(flag) == engine.program.set_flag:
            yield from ((f"--{name}", [value]) for name, _, value in (each.partition("=") for each in values))
        elif flag or values:
            yield flag, values


def _value(program: Program, name: str, text: str) -> Any:
    """Convert a command-line value to a number if it is one; otherwise return `text`."""
    if re.fullmatch(r"-?(\d+|\d*\.\d+)", text):
        return float(text) if "." in text else int(text)
    return parse_length(text, program.units) if name.replace("-", "_") in LENGTHS else text
