"""What hydra and OmegaConf say of a tree that they cannot compose, as one SpecError: the file, the key and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from flagcore.errors import SpecError
from flagcore.spec.plain_data import spec_error

_NAMES = 12
_DUPLICATE = re.compile(r"found duplicate key (.+)")
_LEXER = "LexerNoViableAlt"
_SWEEPS = ("Sweep parameters ", "Ambiguous value for argument ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was to be composed: `name` in `directory`, with `overrides`; `file` is the top file in the user's words."""

    directory: Path
    name: str
    overrides: Sequence[str]
    file: str

    def spelt(self, path: Path) -> str:
        """Return a file of the tree as the user would write it."""
        try:
            return str(self.directory / path.relative_to(self.directory.resolve()))
        except ValueError:
            return str(path)


def refused(error: Exception, asked: Asked) -> SpecError:
    """Return what is to be said of an error out of hydra's compose."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError):
        return _of_yaml(error, asked)
    if isinstance(error, UnicodeDecodeError):
        return _of_text(asked)
    if isinstance(error, RecursionError):
        problem, fix = "contains itself, by an anchor or by defaults that name one another", "break the circle"
        return spec_error("the tree", problem, fix=fix, file=asked.file)
    if isinstance(error, MissingConfigException):
        return _of_absent(error, asked)
    if isinstance(error, OverrideParseException):
        said, fix = _lines(error)[-1], "write key=value, and quote what is no plain word: key='a b'"
        if "[" in error.override.partition("=")[0]:
            fix = "write a place of a list as serve.0"
        problem = "is none of hydra's" if said.startswith(_LEXER) else f"is none of hydra's: {said}"
        return spec_error("the override", problem, value=error.override, fix=fix, file=asked.file)
    if found := next((each for each in _causes(error) if getattr(each, "full_key", None)), None):
        return _of_value(found, error, asked)
    if override := _named(error, asked):
        return _of_override(override, _lines(error), asked)
    lines = _lines(error) or [type(error).__name__]
    problem, fix = f"cannot be composed by hydra: {' '.join(lines)}", "mend the tree or the overrides"
    return spec_error("the tree", problem, fix=fix, file=asked.file)


def _of_yaml(error: object, asked: Asked) -> SpecError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    said = str(getattr(error, "problem", None) or getattr(error, "context", ""))
    file = asked.spelt(Path(mark.name)) if mark else asked.file
    key = f"line {mark.line + 1}" if mark else "the file"
    if found := _DUPLICATE.search(said):
        return spec_error(key, f"gives {found[1]} a second time", fix="keep one of them", file=file)
    fix = "indent with blanks" if r"'\t'" in said else "mend the line, or the one before it"
    return spec_error(key, f"is no YAML: {said}", fix=fix, file=file)


def _of_text(asked: Asked) -> SpecError:
    """Tell which file of the tree is no text; hydra reads the top file first."""
    for path in sorted(asked.directory.rglob("*.yaml"), key=lambda each: (each != Path(asked.file), str(each))):
        try:
            path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            return spec_error("the file", "is no text in UTF-8", fix="save it as UTF-8", file=str(path))
    return spec_error("the tree", "is no text in UTF-8", fix="save its files as UTF-8", file=asked.file)


def _of_absent(error: object, asked: Asked) -> SpecError:
    missing = str(getattr(error, "missing_cfg_file", "") or "")
    if missing in ("", asked.name):
        there = sorted(path.stem for path in asked.directory.glob("*.yaml"))
        fix = _of(there, asked.name) or "give the folder that has the tree's top file as --config-path"
        return spec_error("--config-name", f"is no file in {asked.directory}", value=asked.name, fix=fix)
    options = sorted(getattr(error, "options", None) or ())
    group, _, last = missing.rpartition("/")
    given = next((each for each in asked.overrides if each.lstrip("+") == f"{group}={last}"), None)
    problem = f"wants {missing}.yaml, which is not there"
    fix = _of(options, last) or f"there is no folder {group}: make it, or take {missing} out of defaults"
    return spec_error(given or "defaults", problem, fix=fix, file=asked.file)


def _of(names: Sequence[str], near: str) -> str:
    found = get_close_matches(near, names, n=3) or names[:_NAMES]
    return f"use {', '.join(found)}" if found else ""


def _of_value(cause: BaseException, error: Exception, asked: Asked) -> SpecError:
    """Tell a value or key of the tree, or of an override, that OmegaConf does not take."""
    from omegaconf.errors import GrammarParseError, KeyValidationError

    said, key = _lines(cause)[0], str(getattr(cause, "full_key", ""))
    if isinstance(cause, GrammarParseError):
        problem, fix = f"is no interpolation: {said}", r"write ${key}, or \${ for a plain one"
        return spec_error(key, problem, value=getattr(cause, "value", None), fix=fix, file=asked.file)
    if isinstance(cause, KeyValidationError):
        problem, fix = "has a key that is neither text nor a number", "quote it"
        return spec_error(key, problem, fix=fix, file=asked.file)
    if override := _named(error, asked):
        lines = _lines(error)
        return _of_override(override, lines if lines[0].startswith("Could not") else [said], asked)
    problem, fix = f"cannot be composed by hydra: {said}", "mend the tree or the overrides"
    return spec_error(key, problem, fix=fix, file=asked.file)


def _of_override(override: str, lines: Sequence[str], asked: Asked) -> SpecError:
    if lines[0].startswith(_SWEEPS):
        problem = "is a sweep of hydra's, and one run is composed"
        fix = "give one value, a list as [1,2], and values to try to experiment.auto_tuner.space"
        return spec_error("the override", problem, value=override, fix=fix, file=asked.file)
    said, fix = next(iter(lines), "").rstrip("."), "mend it, or leave it out"
    problem = f"is refused by hydra: {said}"
    if said.startswith("Could not override"):
        problem, fix = "names a key that is not there", f"mend the key, or add it: +{override}"
    elif said.startswith("Could not append"):
        problem, fix = "adds a key that is there already", f"change it: {override.lstrip('+')}"
    return spec_error("the override", problem, value=override, fix=fix, file=asked.file)


def _named(error: Exception, asked: Asked) -> str | None:
    """Return the override of which an error speaks."""
    text = str(error)
    if found := next((each for each in asked.overrides if each in text), None):
        return found
    keys = {each: each.lstrip("+~").partition("=")[0] for each in asked.overrides}
    group = "Config group override" in text
    return next((each for each, key in keys.items() if f"'{key}'" in text or (group and "." not in key)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lines(error: BaseException) -> list[str]:
    """Return what an error says, without hydra's addresses and drawings."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return [
        line for line in lines if line.strip("^ ") and not line.startswith(("See http", "full_key:", "object_type"))
    ]
