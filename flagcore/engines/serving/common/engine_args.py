"""Flags of `engine_args` that are not knobs: rejected if reserved or unknown, and written to the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from flagcore.domain.serving import EngineArg
from flagcore.domain.spec import Spec
from flagcore.engines.serving.common import program
from flagcore.errors import FlagError, SpecError

RESERVED: Mapping[str, str] = {
    "host": "servers listen on this machine only",
    "port": "each trial uses a free port",
    "api-key": "the load client sends no key, and servers listen on this machine only",
    "ssl-keyfile": "the load client uses plain HTTP",
    "ssl-certfile": "the load client uses plain HTTP",
}
"""Flags of several engines that the user cannot set, and why."""

_LITERAL = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")
_FIELD = re.compile(r"^ {4}([a-z]\w*)\s*:", re.MULTILINE)
_MAX_BYTES = 8 << 20


def installed_flags(
    spec: Spec, command: tuple[str, ...], files: tuple[str, ...], fields: tuple[str, ...] = ()
) -> frozenset[str]:
    """Return the flags of the installed engine, by its source; none if it is not installed."""
    try:
        found = program.found(spec, command)
    except FlagError:
        return frozenset()
    return flags_in_source(program.package_folders(found[0]), files, fields)


@lru_cache(maxsize=16)
def flags_in_source(folders: tuple[str, ...], files: tuple[str, ...], fields: tuple[str, ...]) -> frozenset[str]:
    """Return the flags in an engine's source, without dashes; none if it is not found.

    `files` have flags as literals; in `fields` each field of a class is one. Nothing is imported or run, which takes
    seconds and may fail. Files that a version does not have are ignored.
    """
    found: set[str] = set()
    for folder in folders:
        for names, pattern in ((files, _LITERAL), (fields, _FIELD)):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and path.stat().st_size < _MAX_BYTES:
                    text = path.read_text(encoding="utf-8", errors="replace")
                    found |= {word.lstrip("-").replace("_", "-") for word in pattern.findall(text)}
        if found:
            break
    return frozenset(found)


def check(names: Iterable[str], reserved: Mapping[str, str], known: Collection[str], engine: str) -> None:
    """Raise SpecError for a reserved flag, and for one that is not among the `known` ones, if there are any."""
    for name in names:
        key, positive = f"serve.engine_args.{name}", name.removeprefix("no-").split(".")[0]
        if reason := reserved.get(name) or reserved.get(positive):
            raise SpecError(key=key, problem=f"is set by flagcore: {reason}", fix="remove it")
        if known and name not in known and positive not in known:
            near = get_close_matches(name, sorted(known), n=1)
            fix = f"did you mean {near[0]}?" if near else "remove it"
            raise SpecError(key=key, problem=f"is not a flag of the installed {engine}", fix=fix)


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
