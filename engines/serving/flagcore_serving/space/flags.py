"""Flags of a server: their spellings in commands, and which of them a program has."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flagcore_importers.programs import strip_dashes

from flagcore.i18n import closest
from flagcore_serving.job import EngineArg

LENGTHS = (
    *("max_model_len", "context_length", "ctx_size"),
    *("kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_scheduled_tokens"),
)
"""Arguments whose value may have a unit, such as 32k. Source: vLLM 0.33 `engine/arg_utils.py`."""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class FlagProblem(NamedTuple):
    """Why an engine may reject a flag, and what to do.

    - `removed`: whether earlier releases had the flag.
    - `is_certain`: False if the release is unknown, and may still have the flag.
    """

    problem: str
    fix: str
    removed: bool = False
    is_certain: bool = True


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values of a JSON object, or of a list with a single one, by their path with dots, or else `value`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0]
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves(f"{name}.{key}", each)
    else:
        yield name, value


def forms(name: str) -> set[str]:
    """Return a flag, and the flag without its negation and without a key after a dot."""
    return {name, name.split(".")[0], name.removeprefix("no-").split(".")[0]}


@lru_cache(maxsize=4096)
def similar(name: str, flags: frozenset[str]) -> str:
    """Return the one of `flags` that `name` abbreviates, or else the most similar one; empty if there is none."""
    longer = [flag for flag in flags if len(name) > 3 and flag.startswith(name)]
    return longer[0] if len(longer) == 1 else closest(name, sorted(flags), cutoff=0.85)


_LITERAL_PATTERN = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")
_FIELD_PATTERN = re.compile(r"^ {4}([a-z]\w*)\s*: .*[^,\s]$", re.MULTILINE)
_MAX_BYTES = 8 << 20


@lru_cache(maxsize=16)
def flags_in_source(folders: tuple[str, ...], files: tuple[str, ...], fields: tuple[str, ...]) -> frozenset[str]:
    """Extract the flags from an engine's source files, without importing or running it. Missing files are ignored."""
    flags: set[str] = set()
    for folder in folders:
        for names, pattern in ((files, _LITERAL_PATTERN), (fields, _FIELD_PATTERN)):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and path.stat().st_size < _MAX_BYTES:
                    flags |= {strip_dashes(word) for word in pattern.findall(path.read_text("utf-8", errors="replace"))}
        if flags:
            break
    return frozenset(flags)


def as_words(args: Mapping[str, EngineArg], *, has_negation: bool) -> list[str]:
    """Return flags and their values as command-line words.

    True gives the bare flag. False gives `--no-` with the flag if `has_negation`, else nothing. None gives nothing.
    """
    words: list[str] = []
    for name, value in args.items():
        dashes = "-" if len(name) <= 3 and name.isalpha() else "--"
        if value is None:
            continue
        if isinstance(value, bool):
            words += [dashes + name] if value else [f"--no-{name}"] if has_negation else []
        else:
            words += [dashes + name, *map(str, value if isinstance(value, list) else [value])]
    return words


def parse_length(value: Any) -> Any:
    """Convert `4k` to 4000, `4K` to 4096 and `1.5k` to 1500, as vLLM does. Return other values unchanged."""
    match = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?([kKmMgG])", value) if isinstance(value, str) else None
    if not match or (match[2] and match[3].isupper()):
        return value
    return int(Decimal(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3]])
