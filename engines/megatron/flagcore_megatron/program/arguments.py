"""The command-line arguments of each Megatron-LM release, and a parser that reads a command as argparse does.

`releases.json` is written by `tools/megatron_arguments.py`, which names its sources.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeAlias, cast

from flagcore_importers.programs import grouped
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from flagcore.i18n import closest

Value: TypeAlias = bool | int | float | str | list[Any] | None

FORK = "flagscale"
"""The local version label of FlagScale's Megatron-LM, as in 0.15.0+flagscale."""
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_COUNTS: Mapping[int | str, str] = {0: "no value", 1: "one value", "?": "one value", "+": "one or more values"}
_CONVERSIONS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpec:
    """One argument of a release, with the parameters of `argparse.ArgumentParser.add_argument`."""

    flags: tuple[str, ...]
    """All spellings of the flag, with their leading dashes."""
    dest: str
    values: int | str = 1
    """Number of values: 0 (a switch), another number, or argparse's ?, + and *."""
    stores: Value = True
    """The value that a switch stores."""
    const: Value = None
    """The value that a flag stores if its optional value (?) is missing."""
    type: str = "str"
    """The type of a value: int, float, str or bool. As in argparse, any text converts to a true bool."""
    choices: tuple[Value, ...] = ()
    default: Value = None
    """The default; None if there is none, or if it is not a plain value."""
    appends: bool = False
    """Whether a repeated flag appends to a list."""

    def convert(self, text: str) -> Value:
        """Return `text` converted to the type of this argument. Raises ValueError for an invalid value."""
        value: Value = _CONVERSIONS.get(self.type, str)(text)
        if self.choices and value not in self.choices:
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a command: its words from index `position` to before `end`, and its unconverted `values`."""

    flag: str
    spec: ArgumentSpec
    values: tuple[str, ...]
    position: int
    end: int

    @property
    def dest(self) -> str:
        """The argparse destination: the name of the parsed value."""
        return self.spec.dest

    @property
    def value(self) -> Value:
        """The value that argparse stores. Raises ValueError for an invalid value."""
        if self.spec.values == 0:
            return self.spec.stores
        if self.spec.values == "?" and not self.values:
            return self.spec.const
        converted = [self.spec.convert(each) for each in self.values]
        return converted[0] if self.spec.values in (1, "?") else list(converted)


@dataclass(frozen=True, slots=True)
class ArgumentProblem:
    """An argument that argparse refuses. `flag` is empty if a value follows no flag."""

    flag: str
    value: str
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class ArgumentTable:
    """The arguments of one release."""

    release: str
    by_flag: Mapping[str, ArgumentSpec]

    def find(self, flag: str) -> ArgumentSpec | None:
        """Return the argument with this flag, also if written as `--a-b=value` or `--a_b`, or None."""
        flag = flag.partition("=")[0]
        return self.by_flag.get(flag) or self.by_flag.get(flag.replace("_", "-"))

    def parse(self, words: Sequence[str]) -> tuple[list[Argument], list[ArgumentProblem]]:
        """Return the known arguments among `words`, and the problems that argparse would report.

        Megatron-LM allows no abbreviated flags.
        """
        arguments: list[Argument] = []
        problems: list[ArgumentProblem] = []
        end = words.index("--") if "--" in words else len(words)  # values follow
        groups = [*grouped(words[:end], self._split_flag), ("", [], [*words[end + 1 :]], end)]
        for flag, inline, following_values, position in groups:
            spec = self.by_flag.get(flag)
            if flag and spec is None:
                problems.append(self._unknown_flag(flag, " ".join([*inline, *following_values])))
                continue
            number = 0
            if spec is not None:
                count = _count(spec, inline or following_values)
                if count is None or count < len(inline):
                    problems.append(_wrong_count(flag, spec, inline))
                    continue
                number = 0 if inline else count
                values = (*inline, *following_values[:number])
                argument = Argument(flag=flag, spec=spec, values=values, position=position, end=position + 1 + number)
                arguments.append(argument)
                problems += _invalid_values(argument)
            problems += [_stray_value(flag, spec, each) for each in following_values[number:]]
        return arguments, problems

    def effective(self, words: Sequence[str]) -> dict[str, Value]:
        """Return the values that argparse would store, by destination. If a flag is repeated, its last value is used.

        Invalid values are skipped; `parse` reports them.
        """
        values: dict[str, Value] = {}
        for argument in self.parse(words)[0]:
            with suppress(ValueError):
                value = argument.value
                if argument.spec.appends:
                    value = [*cast("list[Any]", values.get(argument.dest, [])), value]
                values[argument.dest] = value
        return values

    def _split_flag(self, word: str) -> tuple[str, str, str]:
        """Split a word into flag, equals sign and value as argparse does. The flag of a plain value is empty."""
        flag, equals, value = word.partition("=")
        if word in self.by_flag:
            return word, "", ""
        if flag in self.by_flag:
            return flag, equals, value
        if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word) or " " in word:
            return "", "", ""
        return flag, equals, value

    def _unknown_flag(self, flag: str, value: str) -> ArgumentProblem:
        """Return the problem that this release does not define a flag."""
        problem = f"is not an argument of Megatron-LM {self.release}"
        fix = "remove it"
        if spec := self.find(flag):
            fix = f"did you mean {spec.flags[0]}?"
        elif releases := releases_with(flag):
            fix = f"remove it; it exists in {', '.join(releases)}"
        elif close := closest(flag, self.by_flag, cutoff=0.75):
            fix = f"did you mean {close}?"
        return ArgumentProblem(flag, value, problem, fix)


def _count(spec: ArgumentSpec, values: Sequence[str]) -> int | None:
    """Return how many of `values` a flag consumes, or None if there are too few."""
    maximum = {"*": len(values), "+": len(values), "?": 1}.get(str(spec.values), spec.values)
    minimum = {"*": 0, "+": 1, "?": 0}.get(str(spec.values), spec.values)
    return min(int(maximum), len(values)) if len(values) >= int(minimum) else None


def _wrong_count(flag: str, spec: ArgumentSpec, inline: Sequence[str]) -> ArgumentProblem:
    """Return the problem that a flag has the wrong number of values. The flag has too few values, or it is written as
    `--flag=value` although it requires none or several."""
    expected_count = _COUNTS.get(spec.values, f"{spec.values} values")
    fix = f"write {flag} {' '.join(map(str, spec.choices[:1])) or 'VALUE'}" if spec.values else f"write {flag}"
    return ArgumentProblem(flag, " ".join(inline), f"takes {expected_count}", fix)


def _stray_value(flag: str, spec: ArgumentSpec | None, value: str) -> ArgumentProblem:
    """Return the problem that a value does not belong to any flag."""
    problem, fix = "is a value without a flag", "remove it, or write its flag before it"
    if spec is not None:
        problem = f"follows {flag}, which takes {_COUNTS.get(spec.values, f'{spec.values} values')}"
        is_switched_off = spec.values == 0 and value.lower() in ("false", "0", "no", "off")
        fix = f"remove {flag}, too" if is_switched_off else "remove it"
    return ArgumentProblem(flag, value, problem, fix)


def _invalid_values(argument: Argument) -> Iterator[ArgumentProblem]:
    """Yield a problem for each value of an argument that has the wrong type or is not one of the choices."""
    spec = argument.spec
    for value in argument.values if spec.values != 0 else ():
        try:
            spec.convert(value)
        except ValueError:
            kinds = {"int": "a whole number", "float": "a number"}
            close = closest(value, map(str, spec.choices))
            fix = f"use {', '.join(map(str, spec.choices))}" if spec.choices else f"use {kinds.get(spec.type)}"
            fix = f"did you mean {close}?" if close else fix
            yield ArgumentProblem(argument.flag, value, "is not a valid value", fix)


def release_table(release: str | None) -> ArgumentTable:
    """Return the arguments of a release of Megatron-LM, such as 0.14.1, or of FlagScale's fork, 0.15.0+flagscale.

    For an unknown release, the table of the next older one is used; for None or an invalid text, the newest table.
    """
    try:
        requested = Version(release) if release else None
    except InvalidVersion:
        requested = None
    if requested is not None and requested.local == FORK:
        return _table(_data()["base"][FORK], FORK)
    releases = known_releases()
    older = [each for each in releases if requested is None or Version(each) <= requested]
    return _table(older[-1] if older else releases[0], "")


def known_releases() -> tuple[str, ...]:
    """Return the releases that have a table, in ascending order. FlagScale's releases are not included."""
    return tuple(each for each in _data()["sources"] if each != FORK)


def releases_with(flag: str) -> tuple[str, ...]:
    """Return the releases whose tables contain `flag`. FlagScale's releases come last."""
    tables = (*(_table(each, "") for each in known_releases()), _table(_data()["base"][FORK], FORK))
    return tuple(table.release for table in tables if flag in table.by_flag)


@lru_cache(maxsize=32)
def _table(release: str, fork: str) -> ArgumentTable:
    by_flag: dict[str, ArgumentSpec] = {}
    contains = lru_cache(lambda specifier: SpecifierSet(specifier).contains(release, prereleases=True))
    for row in _data()["arguments"]:
        fork_entry = row.get(FORK)
        if fork_entry == "only" or not contains(row.get("releases", "")):
            is_included = bool(fork) and fork_entry in ("only", "also")
        else:
            is_included = not fork or fork_entry != "not"
        if is_included:
            spec = argument_spec(row)
            by_flag |= dict.fromkeys(spec.flags, spec)
    return ArgumentTable(release=f"{release}+{fork}" if fork else release, by_flag=by_flag)


def argument_spec(row: Mapping[str, Any]) -> ArgumentSpec:
    """Return the argument that an entry of `releases.json` describes."""
    flags = tuple(row["flags"])
    first_flag = next((flag for flag in flags if flag.startswith("--")), flags[0])
    fields = {name: row[name] for name in ("values", "stores", "const", "type", "default", "appends") if name in row}
    dest = row.get("dest", first_flag.lstrip("-").replace("-", "_"))
    return ArgumentSpec(flags=flags, dest=dest, choices=tuple(row.get("choices", ())), **fields)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = files(__package__).joinpath("releases.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
