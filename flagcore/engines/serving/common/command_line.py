"""The program of an engine: `engine.yaml`, `engine_args` of a spec, the installed version, and the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.common import knobs, program
from flagcore.engines.serving.common.program import bare
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.model.work import Overheads, Releases
from flagcore.errors import NoDevice, SpecError, join_errors

RESERVED: Mapping[str, str] = {
    "host": "servers listen where the load client is",
    "port": "each trial uses a free port",
    "api-key": "the load client sends no key",
    "ssl-keyfile": "the load client uses plain HTTP",
    "ssl-certfile": "the load client uses plain HTTP",
    **dict.fromkeys(
        ("nnodes", "node-rank", "master-addr", "master-port", "headless", "dist-init-addr"),
        "each host of an instance has its own",
    ),
}
"""Flags of several engines that the user cannot set, and why."""


class EngineArgs(NamedTuple):
    """`engine_args` of a spec: the knobs that they fix for all candidates, and the flags that are not knobs."""

    fixed: dict[str, KnobValue]
    others: dict[str, EngineArg]


P = TypeVar("P", bound="Program")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An engine as released: flags, log lines, counters, and overheads on top of kernels.

    `program` is the command unless the spec has one; `packages` are the pip packages that may install it. `reserved`
    are flags that the user cannot set, and why. The installed engine's source has its flags as literals in
    `flag_files`, and as fields of a class in `flag_fields`; without them flags are not checked.

    `counters` are the samples of /metrics that explain a score, and their names in a trial's figures. `settings` are
    regular expressions for the log by knob, whose only group is the value in use; the first that matches counts.
    `memory` are the same for figures of memory, whose largest match counts. `failures` are what log lines mean, from
    specific to general. `overheads` are what the engine adds to its kernels, by the release from which on it holds, the
    newest first. `block_sizes` are those of attention backends that take only some.
    """

    title: str
    program: Sequence[str]
    knobs: tuple[Knob, ...]
    packages: Sequence[str] = ()
    reserved: Mapping[str, str] = field(default_factory=lambda: RESERVED)
    flag_files: Sequence[str] = ()
    flag_fields: Sequence[str] = ()
    counters: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    memory: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[FailurePattern, ...] = ()
    overheads: Releases = field(default_factory=dict)
    block_sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def read(cls: type[P], package: str, knobs: tuple[Knob, ...]) -> P:
        """Return the program that `engine.yaml` of an engine's package describes; its keys are the fields."""
        data = yaml.load(files(package).joinpath("engine.yaml").read_text("utf-8"), _Loader)
        data["reserved"] = RESERVED | data["reserved"]
        data["failures"] = tuple(
            FailurePattern(pattern="|".join(row["lines"]), state=TrialState(row["state"]), advice=row.get("advice", ""))
            for row in data["failures"]
        )
        data["overheads"] = {since: Overheads(**values) for since, values in data.get("overheads", {}).items()}
        return cls(knobs=knobs, **data)

    def parse(self, spec: Spec) -> EngineArgs:
        """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError."""
        found = self.split(spec)
        self.check(found.others, self.installed_flags(spec) if found.others else ())
        return found

    def split(self, spec: Spec) -> EngineArgs:
        """Return the same without a check of the other flags: a knob is set by its own name or by its flag."""
        by_flag = {
            bare(word): (knob, flag)
            for knob in reversed(self.knobs)
            for flag in knob.flags
            for word in (flag.name, flag.off)
        }
        by_name = {knob.name: knob for knob in self.knobs}
        found, problems = EngineArgs({}, {}), list[SpecError]()
        for key, value in spec.serve.engine_args.items():
            name = bare(key)
            knob, flag = by_name.get(name.replace("-", "_")), None
            if knob is None and name in by_flag:
                knob, flag = by_flag[name]
            if knob is None:
                found.others[name] = value
            elif flag is not None and name == flag.off and isinstance(value, bool):
                found.fixed[knob.name] = not value
            else:
                try:
                    found.fixed[knob.name] = knob.parse(value, f"serve.engine_args.{key}")
                except SpecError as error:
                    problems.append(error)
        if problems:
            raise join_errors(problems)
        return found

    def check(self, names: Iterable[str], known: Collection[str]) -> None:
        """Raise SpecError for a reserved flag, and for one that is not among the `known` ones, if there are any."""
        problems: list[SpecError] = []
        for name in names:
            key, positive = f"serve.engine_args.{name}", name.removeprefix("no-").split(".")[0]
            if reason := self.reserved.get(name) or self.reserved.get(positive):
                problems.append(SpecError(key=key, problem=f"is set by flagcore: {reason}", fix="remove it"))
            elif known and name not in known and positive not in known:
                near = get_close_matches(name, sorted(known), n=1)
                fix = f"did you mean {near[0]}?" if near else "remove it"
                problems.append(SpecError(key=key, problem=f"is not a flag of the installed {self.title}", fix=fix))
        if problems:
            raise join_errors(problems)

    def installed_flags(self, spec: Spec) -> frozenset[str]:
        """Return the flags of the installed engine, without dashes; none if it is not installed."""
        try:
            found = self.command(spec)
        except NoDevice:
            return frozenset()
        return _flags_in_source(program.package_folders(found[0]), tuple(self.flag_files), tuple(self.flag_fields))

    def columns(self, task: Task, columns: Columns) -> dict[str, IntArray]:
        """Return a column of each knob; if there is none, of the value that `engine_args` fix, or the neutral one."""
        return knobs.all_columns(columns, self.knobs, self.parse(task.spec).fixed)

    def command(self, spec: Spec) -> tuple[str, ...]:
        """Return the command that starts the engine, with an absolute path. Raises NoDevice if it does not exist."""
        return program.found(spec, tuple(self.program))

    def version(self, spec: Spec) -> str:
        """Return the version of the spec, or of the installed package; empty if unknown."""
        if spec.serve.engine_version:
            return spec.serve.engine_version
        try:
            return program.package_version(self.command(spec)[0], *self.packages)
        except NoDevice:
            return ""

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice unless servers can be started with a Hugging Face directory."""
        check_directory(spec)
        command = self.command(spec)
        installed = program.package_version(command[0], *self.packages)
        program.check_version(spec, installed)
        if spec.serve.command is None and "-m" in command and not installed:
            raise NoDevice(
                f"{self.title} is not installed for {command[0]}; install {self.packages[0]} there, or give a "
                "serve.command"
            )
        self.parse(spec)


_LITERAL = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")
_FIELD = re.compile(r"^ {4}([a-z]\w*)\s*:", re.MULTILINE)
_MAX_BYTES = 8 << 20


@lru_cache(maxsize=16)
def _flags_in_source(folders: tuple[str, ...], files: tuple[str, ...], fields: tuple[str, ...]) -> frozenset[str]:
    """Return the flags in an engine's source. Nothing is imported or run, which takes seconds and may fail.

    Files that a version does not have are ignored.
    """
    found: set[str] = set()
    for folder in folders:
        for names, pattern in ((files, _LITERAL), (fields, _FIELD)):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and path.stat().st_size < _MAX_BYTES:
                    found |= {bare(word) for word in pattern.findall(path.read_text("utf-8", errors="replace"))}
        if found:
            break
    return frozenset(found)


def written(args: Mapping[str, EngineArg], *, negated: bool) -> list[str]:
    """Return flags as words: true is a bare flag, false its opposite if there is one (`negated`), null nothing."""
    words: list[str] = []
    for name, value in args.items():
        dashes = "-" if len(name) <= 3 and name.isalpha() else "--"
        if value is None:
            continue
        if isinstance(value, bool):
            words += [dashes + name] if value else [f"--no-{name}"] if negated else []
        else:
            words += [dashes + name, str(value)]
    return words
