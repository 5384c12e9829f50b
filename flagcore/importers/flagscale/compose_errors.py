"""Errors of hydra and OmegaConf as a SpecError with file, key and fix."""

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
class Request:
    """What is composed: `name` in `directory`, with `overrides`. `file` is the top file as the user wrote it."""

    directory: Path
    name: str
    overrides: Sequence[str]
    file: str

    def display(self, path: Path) -> str:
        """Return a file of the tree as the user would write it."""
        try:
            return str(self.directory / path.relative_to(self.directory.resolve()))
        except ValueError:
            return str(path)


def compose_error(error: Exception, request: Request) -> SpecError:
    """Return what is to be message of an error out of hydra's compose."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError):
        return _yaml_error(error, request)
    if isinstance(error, UnicodeDecodeError):
        return _encoding_error(request)
    if isinstance(error, RecursionError):
        problem, fix = "contains itself, by an anchor or by defaults that name one another", "remove the cycle"
        return spec_error("the tree", problem, fix=fix, file=request.file)
    if isinstance(error, MissingConfigException):
        return _missing_file_error(error, request)
    if isinstance(error, OverrideParseException):
        message, fix = _lines(error)[-1], "write key=value, with quotes if needed: key='a b'"
        if "[" in error.override.partition("=")[0]:
            fix = "write an index as serve.0"
        problem = "is invalid" if message.startswith(_LEXER) else f"is invalid: {message}"
        return spec_error("the override", problem, value=error.override, fix=fix, file=request.file)
    if found := next((each for each in _causes(error) if getattr(each, "full_key", None)), None):
        return _value_error(found, error, request)
    if override := _named_override(error, request):
        return _override_error(override, _lines(error), request)
    lines = _lines(error) or [type(error).__name__]
    problem, fix = f"cannot be composed by hydra: {' '.join(lines)}", "fix the tree or the overrides"
    return spec_error("the tree", problem, fix=fix, file=request.file)


def _yaml_error(error: object, request: Request) -> SpecError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    message = str(getattr(error, "problem", None) or getattr(error, "context", ""))
    file = request.display(Path(mark.name)) if mark else request.file
    key = f"line {mark.line + 1}" if mark else "the file"
    if found := _DUPLICATE.search(message):
        return spec_error(key, f"gives {found[1]} a second time", fix="keep one of them", file=file)
    fix = "indent with blanks" if r"'\t'" in message else "fix the line, or the one before it"
    return spec_error(key, f"is not valid YAML: {message}", fix=fix, file=file)


def _encoding_error(request: Request) -> SpecError:
    """Name the file of the tree that is not UTF-8; hydra reads the top file first."""
    for path in sorted(request.directory.rglob("*.yaml"), key=lambda each: (each != Path(request.file), str(each))):
        try:
            path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            return spec_error("the file", "is not UTF-8 text", fix="save it as UTF-8", file=str(path))
    return spec_error("the tree", "is not UTF-8 text", fix="save its files as UTF-8", file=request.file)


def _missing_file_error(error: object, request: Request) -> SpecError:
    missing = str(getattr(error, "missing_cfg_file", "") or "")
    if missing in ("", request.name):
        there = sorted(path.stem for path in request.directory.glob("*.yaml"))
        fix = _suggestion(there, request.name) or "give the folder that has the tree's top file as --config-path"
        return spec_error("--config-name", f"is not a file in {request.directory}", value=request.name, fix=fix)
    options = sorted(getattr(error, "options", None) or ())
    group, _, last = missing.rpartition("/")
    given = next((each for each in request.overrides if each.lstrip("+") == f"{group}={last}"), None)
    problem = f"needs {missing}.yaml, which does not exist"
    fix = _suggestion(options, last) or f"create the folder {group}, or remove {missing} from defaults"
    return spec_error(given or "defaults", problem, fix=fix, file=request.file)


def _suggestion(names: Sequence[str], near: str) -> str:
    found = get_close_matches(near, names, n=3) or names[:_NAMES]
    return f"use {', '.join(found)}" if found else ""


def _value_error(cause: BaseException, error: Exception, request: Request) -> SpecError:
    """Name a value or key of the tree, or of an override, that OmegaConf rejects."""
    from omegaconf.errors import GrammarParseError, KeyValidationError

    message, key = _lines(cause)[0], str(getattr(cause, "full_key", ""))
    if isinstance(cause, GrammarParseError):
        problem, fix = f"is not a valid interpolation: {message}", r"write ${key}, or \${ for a plain one"
        return spec_error(key, problem, value=getattr(cause, "value", None), fix=fix, file=request.file)
    if isinstance(cause, KeyValidationError):
        problem, fix = "has a key that is neither text nor a number", "quote it"
        return spec_error(key, problem, fix=fix, file=request.file)
    if override := _named_override(error, request):
        lines = _lines(error)
        return _override_error(override, lines if lines[0].startswith("Could not") else [message], request)
    problem, fix = f"cannot be composed by hydra: {message}", "fix the tree or the overrides"
    return spec_error(key, problem, fix=fix, file=request.file)


def _override_error(override: str, lines: Sequence[str], request: Request) -> SpecError:
    if lines[0].startswith(_SWEEPS):
        problem = "is a sweep"
        fix = "give one value; lists of values to try go into experiment.auto_tuner.space"
        return spec_error("the override", problem, value=override, fix=fix, file=request.file)
    message, fix = next(iter(lines), "").rstrip("."), "fix it, or leave it out"
    problem = f"is invalid: {message}"
    if message.startswith("Could not override"):
        problem, fix = "names an unknown key", f"fix the key, or add it: +{override}"
    elif message.startswith("Could not append"):
        problem, fix = "adds a key that exists already", f"change it: {override.lstrip('+')}"
    return spec_error("the override", problem, value=override, fix=fix, file=request.file)


def _named_override(error: Exception, request: Request) -> str | None:
    """Return the override that an error names."""
    text = str(error)
    if found := next((each for each in request.overrides if each in text), None):
        return found
    keys = {each: each.lstrip("+~").partition("=")[0] for each in request.overrides}
    group = "Config group override" in text
    return next((each for each, key in keys.items() if f"'{key}'" in text or (group and "." not in key)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lines(error: BaseException) -> list[str]:
    """Return the lines of an error without hydra's links and markers."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return [
        line for line in lines if line.strip("^ ") and not line.startswith(("See http", "full_key:", "object_type"))
    ]
