"""Arguments of Megatron-LM's command line by release, and how its argparse parser reads a command.

`releases.json` is written by `tools/megatron_arguments.py`, which names its sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from itertools import takewhile
from typing import Any, TypeAlias, cast

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

Value: TypeAlias = "bool | int | float | str | list[Any] | None"

FORK = "flagscale"
"""The local version label of FlagScale's Megatron-LM: 0.15.0+flagscale."""
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_COUNTS: Mapping[int | str, str] = {0: "no value", 1: "one value", "?": "one value", "+": "one or more values"}
_CONVERSIONS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpec:
    """One argument of a release, as `argparse.ArgumentParser.add_argument` has it."""

    flags: tuple[str, ...]
    """Its spellings with dashes."""
    dest: str
    values: int | str = 1
    """How many values follow: 0 (a switch), another number, or argparse's ?, + and *."""
    stores: Value = True
    """What a switch stores."""
    const: Value = None
    """What a flag without its optional value (?) stores."""
    type: str = "str"
    """int, float, str, or bool, with which any text is true."""
    choices: tuple[Value, ...] = ()
    default: Value = None
    """None also where the default is no plain value."""
    appends: bool = False
    """Whether a repeated flag adds to a list."""
    needs: str = ""
    """A package without which the argument does not exist."""

    def convert(self, text: str) -> Value:
        """Return the value that `text` stands for. Raises ValueError."""
        value: Value = _CONVERSIONS.get(self.type, str)(text)
        if self.choices and value not in self.choices:
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a command: the words from `position` to before `end`, `values` as they are written."""

    flag: str
    spec: ArgumentSpec
    values: tuple[str, ...]
    position: int
    end: int

    @property
    def dest(self) -> str:
        """The name of the parsed value."""
        return self.spec.dest

    @property
    def value(self) -> Value:
        """What argparse stores. Raises ValueError for an invalid value."""
        if self.spec.values == 0:
            return self.spec.stores
        if self.spec.values == "?" and not self.values:
            return self.spec.const
        converted = [self.spec.convert(each) for each in self.values]
        return converted[0] if self.spec.values in (1, "?") else list(converted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentProblem:
    """What argparse refuses at a place of a command. `flag` is empty for a value that belongs to no flag."""

    flag: str
    value: str
    problem: str
    fix: str
    position: int


@dataclass(frozen=True, slots=True)
class ArgumentTable:
    """The arguments of one release."""

    release: str
    by_flag: Mapping[str, ArgumentSpec]

    def find(self, flag: str) -> ArgumentSpec | None:
        """Return the argument that `--a-b`, `--a-b=value` or `--a_b` means, or None. argparse refuses the last."""
        flag = flag.partition("=")[0]
        return self.by_flag.get(flag) or self.by_flag.get(flag.replace("_", "-"))

    def parse(self, words: Sequence[str]) -> tuple[list[Argument], list[ArgumentProblem]]:
        """Return the known arguments of a command without its program, and all that argparse would refuse.

        Megatron-LM allows no abbreviations.
        """
        arguments: list[Argument] = []
        problems: list[ArgumentProblem] = []
        for position, flag, inline, following in self._mentions(words):
            spec = self.by_flag.get(flag)
            if flag and spec is None:
                problems.append(self._unknown(flag, " ".join([*inline, *following]), position))
                continue
            taken = 0
            if spec is not None:
                count = _count(spec, inline or following)
                if count is None or count < len(inline):
                    problems.append(_wrong_count(flag, spec, inline, position))
                    continue
                taken = 0 if inline else count
                values = (*inline, *following[:taken])
                argument = Argument(flag=flag, spec=spec, values=values, position=position, end=position + 1 + taken)
                arguments.append(argument)
                problems += _invalid_values(argument)
            start = position + bool(flag)
            problems += [_stray(flag, spec, each, start + place) for place, each in enumerate(following[taken:], taken)]
        return arguments, problems

    def effective(self, words: Sequence[str]) -> dict[str, Value]:
        """Return what argparse would store for the arguments of a command, by destination: the last mention counts.

        Invalid values are left out, see `parse`.
        """
        found: dict[str, Value] = {}
        for argument in self.parse(words)[0]:
            with suppress(ValueError):
                value = argument.value
                if argument.spec.appends:
                    value = [*cast("list[Any]", found.get(argument.dest, [])), value]
                found[argument.dest] = value
        return found

    def _mentions(self, words: Sequence[str]) -> Iterator[tuple[int, str, tuple[str, ...], list[str]]]:
        """Yield the place of each flag, the flag, the value behind its equals sign, and the values that follow.

        Values without a flag have an empty one.
        """
        position = 0
        while position < len(words):
            flag, equals, value = self._flag(words[position])
            start = position + bool(flag)
            following = list(takewhile(lambda word: not self._flag(word)[0], words[start:]))
            if flag == "--":
                flag, following = "", list(words[start:])
                position += 1
            yield position, flag, (value,) if equals else (), following
            position = start + len(following)

    def _flag(self, word: str) -> tuple[str, str, str]:
        """Return flag, equals sign and value of a word as argparse splits it; an empty flag for a value."""
        flag, equals, value = word.partition("=")
        if word in self.by_flag:
            return word, "", ""
        if flag in self.by_flag:
            return flag, equals, value
        if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word) or " " in word:
            return "", "", ""
        return flag, equals, value

    def _unknown(self, flag: str, value: str, position: int) -> ArgumentProblem:
        """Return the problem of a flag that this release does not have."""
        problem = f"is not an argument of Megatron-LM {self.release}"
        fix = "remove it"
        if spec := self.find(flag):
            fix = f"did you mean {spec.flags[0]}?"
        elif having := releases_with(flag):
            fix = f"remove it; it is known in {', '.join(having)}"
        elif near := get_close_matches(flag, self.by_flag, n=1, cutoff=0.75):
            fix = f"did you mean {near[0]}?"
        return ArgumentProblem(flag=flag, value=value, problem=problem, fix=fix, position=position)


def _count(spec: ArgumentSpec, values: Sequence[str]) -> int | None:
    """Return how many of some values a flag takes, or None if they are too few. A value behind "=" must be taken."""
    most = {"*": len(values), "+": len(values), "?": 1}.get(str(spec.values), spec.values)
    least = {"*": 0, "+": 1, "?": 0}.get(str(spec.values), spec.values)
    return min(int(most), len(values)) if len(values) >= int(least) else None


def _wrong_count(flag: str, spec: ArgumentSpec, inline: Sequence[str], position: int) -> ArgumentProblem:
    """Return the problem of a flag without its values, or of `--flag=value` where it takes more than one."""
    wanted = _COUNTS.get(spec.values, f"{spec.values} values")
    fix = f"write {flag} {' '.join(map(str, spec.choices[:1])) or 'VALUE'}" if spec.values else f"write {flag}"
    return ArgumentProblem(flag=flag, value=" ".join(inline), problem=f"takes {wanted}", fix=fix, position=position)


def _stray(flag: str, spec: ArgumentSpec | None, value: str, position: int) -> ArgumentProblem:
    """Return the problem of a value that no flag takes."""
    problem, fix = "is a value without a flag", "remove it, or write its flag before it"
    if spec is not None:
        problem = f"stands behind {flag}, which takes {_COUNTS.get(spec.values, f'{spec.values} values')}"
        off = spec.values == 0 and value.lower() in ("false", "0", "no", "off")
        fix = f"remove {flag}, too" if off else "remove it"
    return ArgumentProblem(flag=flag, value=value, problem=problem, fix=fix, position=position)


def _invalid_values(argument: Argument) -> Iterator[ArgumentProblem]:
    """Yield the problem of each value of another type, or that is none of the choices."""
    spec = argument.spec
    for value in argument.values if spec.values != 0 else ():
        try:
            spec.convert(value)
        except ValueError:
            kinds = {"int": "a whole number", "float": "a number"}
            near = get_close_matches(value, map(str, spec.choices), n=1)
            fix = f"use {', '.join(map(str, spec.choices))}" if spec.choices else f"use {kinds.get(spec.type)}"
            yield ArgumentProblem(
                flag=argument.flag,
                value=value,
                problem="is not a valid value",
                fix=f"did you mean {near[0]}?" if near else fix,
                position=argument.position,
            )


def release_table(release: str | None) -> ArgumentTable:
    """Return the arguments of a release of Megatron-LM, such as 0.14.1, or of FlagScale's, 0.15.0+flagscale.

    It is the nearest known release at or below; the newest for None, a newer one and text that is no release.
    """
    try:
        wanted = Version(release) if release else None
    except InvalidVersion:
        wanted = None
    if wanted is not None and wanted.local == FORK:
        return _table(_data()["base"][FORK], FORK)
    known = known_releases()
    below = [each for each in known if wanted is None or Version(each) <= wanted]
    return _table(below[-1] if below else known[0], "")


def known_releases() -> tuple[str, ...]:
    """Return the releases that have a table, ascending, without FlagScale's."""
    return tuple(each for each in _data()["sources"] if each != FORK)


def releases_with(flag: str) -> tuple[str, ...]:
    """Return the releases, FlagScale's last, whose tables have a flag."""
    tables = (*(_table(each, "") for each in known_releases()), _table(_data()["base"][FORK], FORK))
    return tuple(table.release for table in tables if flag in table.by_flag)


@lru_cache(maxsize=32)
def _table(release: str, fork: str) -> ArgumentTable:
    by_flag: dict[str, ArgumentSpec] = {}
    contains = lru_cache(lambda specifier: SpecifierSet(specifier).contains(release, prereleases=True))
    for row in _data()["arguments"]:
        of_fork = row.get(FORK)
        if of_fork == "only" or not contains(row.get("releases", "")):
            has_it = bool(fork) and of_fork in ("only", "also")
        else:
            has_it = not fork or of_fork != "not"
        if has_it:
            spec = argument_spec(row)
            by_flag |= dict.fromkeys(spec.flags, spec)
    return ArgumentTable(release=f"{release}+{fork}" if fork else release, by_flag=by_flag)


def argument_spec(row: Mapping[str, Any]) -> ArgumentSpec:
    """Return the argument that a row of the file stands for."""
    flags = tuple(row["flags"])
    first = next((flag for flag in flags if flag.startswith("--")), flags[0])
    given = {
        name: row[name] for name in ("values", "stores", "const", "type", "default", "appends", "needs") if name in row
    }
    dest = row.get("dest", first.lstrip("-").replace("-", "_"))
    return ArgumentSpec(flags=flags, dest=dest, choices=tuple(row.get("choices", ())), **given)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = files(__package__).joinpath("releases.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
