"""Plain data: JSON-like values with limits on their size, and errors about them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from flagcore.errors import SpecError

MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_MESSAGE = 400
_MAX_INT = 2**63
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")

KeyPath = tuple["str | int", ...]


def spec_error(key: KeyPath | str, problem: str, *, value: object = None, fix: str = "", file: str = "") -> SpecError:
    """Return a SpecError whose message is one line of fewer than MAX_MESSAGE characters."""
    name = key if isinstance(key, str) else key_text(key)
    name, problem, fix, file = (_one_line(text) for text in (name, problem, fix, file))
    error = SpecError(key=name, problem=problem, value=value, fix=fix, file=file)
    if len(str(error)) < MAX_MESSAGE:
        return error
    return SpecError(
        key=_shorten_start(name, 60),
        problem=_shorten_end(problem, 110),
        value=value,
        fix=_shorten_end(fix, 80),
        file=_shorten_start(file, 60),
    )


def key_text(path: KeyPath) -> str:
    """Return a key path as text, such as `auto_tuner.space.micro_batch_size[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{_shorten_end(repr(part[:64]), 60)}]"
    return text or "the document"


def plain(value: object, *, file: str = "") -> Any:
    """Return a deep copy of `value` that consists of dict, list, str, int, float, bool and None.

    Raises SpecError for other types, more than MAX_DEPTH levels or MAX_VALUES values, integers beyond 64 bits,
    infinities and control characters.
    """
    return _Copier(file).copy(value, ())


class _Copier:
    def __init__(self, file: str) -> None:
        self.file = file
        self.values_left = MAX_VALUES

    def copy(self, value: object, path: KeyPath) -> Any:
        self.values_left -= 1
        if self.values_left < 0:
            raise self.error(path, f"has more than {MAX_VALUES:,} values", fix="write fewer keys, or fewer aliases")
        if len(path) > MAX_DEPTH:
            raise self.error(path, f"is nested more than {MAX_DEPTH} deep, or contains itself", fix="flatten it")
        if isinstance(value, Mapping):
            return {self.key(key, path): self.copy(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            return [self.copy(item, (*path, index)) for index, item in enumerate(value)]
        return self.scalar(value, path)

    def key(self, key: object, path: KeyPath) -> str:
        if not isinstance(key, str):
            raise self.error(path, f"has a key of type {type(key).__name__}", fix="keys must be strings: quote it")
        if _UNPRINTABLE.search(key):
            raise self.error((*path, key), "has a control character in its name", fix="remove it")
        return key

    def scalar(self, value: object, path: KeyPath) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if _UNPRINTABLE.search(value):
                raise self.error(path, "contains a control character", value=value, fix="remove it")
            return str(value)
        if isinstance(value, int):
            if not -_MAX_INT <= value < _MAX_INT:
                raise self.error(path, "has too many digits", value=value, fix="use a number below 2**63")
            return int(value)
        if isinstance(value, float):
            if not isfinite(value):
                raise self.error(path, "is not finite", value=value, fix="use a finite number")
            return float(value)
        kind = type(value).__name__
        raise self.error(path, f"is of type {kind}", fix="use text, a number, true, false, null, a list or a mapping")

    def error(self, path: KeyPath, problem: str, *, value: object = None, fix: str = "") -> SpecError:
        return spec_error(path, problem, value=value, fix=fix, file=self.file)


def _one_line(text: str) -> str:
    return _UNPRINTABLE.sub("?", re.sub(r"\s+", " ", text[:10_000]))


def _shorten_end(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


def _shorten_start(text: str, size: int) -> str:
    return text if len(text) <= size else "..." + text[len(text) - size + 3 :]
