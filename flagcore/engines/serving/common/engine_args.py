"""Flags of `engine_args` that are no knobs: refused where flagcore gives them, found misspelt, and written out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from flagcore.domain.serving import EngineArg
from flagcore.errors import SpecError

_LITERAL = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")
_FIELD = re.compile(r"^ {4}([a-z]\w*)\s*:", re.MULTILINE)
_LARGEST = 8 << 20


@lru_cache(maxsize=16)
def flags_in_source(folders: tuple[str, ...], files: tuple[str, ...], fields: tuple[str, ...]) -> frozenset[str]:
    """Return the flags that an installed engine's own source names, without dashes; none if it is not found.

    `files` have flags as literals, in `fields` each field of a class is one. Nothing is imported or run, which takes
    seconds and may fail; a file that a version does not have is left out.
    """
    found: set[str] = set()
    for folder in folders:
        for names, pattern in ((files, _LITERAL), (fields, _FIELD)):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and path.stat().st_size < _LARGEST:
                    text = path.read_text(encoding="utf-8", errors="replace")
                    found |= {word.lstrip("-").replace("_", "-") for word in pattern.findall(text)}
        if found:
            break
    return frozenset(found)


def check(names: Iterable[str], ours: Mapping[str, str], known: Collection[str], engine: str) -> None:
    """Raise SpecError for a flag that flagcore gives itself, or that the installed engine does not know.

    Without `known` flags of the installed version every other name is taken.
    """
    for name in names:
        key, positive = f"serve.engine_args.{name}", name.removeprefix("no-").split(".")[0]
        reason = ours.get(name) or ours.get(positive)
        if reason:
            raise SpecError(key=key, problem=f"is a flag that flagcore gives itself: {reason}", fix="leave it out")
        if known and name not in known and positive not in known:
            near = get_close_matches(name, sorted(known), n=1)
            fix = f"did you mean {near[0]}?" if near else "leave it out"
            raise SpecError(key=key, problem=f"is no flag of the installed {engine}", fix=fix)


def written(args: Mapping[str, EngineArg], *, negated: bool) -> list[str]:
    """Return flags as words: true is a bare flag, false its opposite where there is one (`negated`), null nothing."""
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
