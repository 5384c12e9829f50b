"""Writes the table of Megatron-LM's arguments by release: `engines/megatron/flagcore_megatron/program/releases.json`.

`python tools/megatron_arguments.py --repository REPO --flagscale WHEEL core_v0.10.0 ... HEAD`, run by a Python with the
imports of Megatron-LM (torch, numpy, einops, packaging). REPO is a clone of NVIDIA/Megatron-LM, the last words are its
tags or commits in ascending order; WHEEL is the folder `flag_scale` of an installed FlagScale, whose Megatron-LM has
additional arguments. Each tree builds its argparse parser in a separate process, and the parser is read.
"""

import argparse
import enum
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import typing
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

TABLE = Path(__file__).resolve().parent.parent / "engines/megatron/flagcore_megatron/program/releases.json"
FORK = "flagscale"
PARTS = ("megatron",)
TYPES = {int: "int", float: "float", bool: "bool"}
"""Python's type of a value; values of other types stay text, or are checked by `choices`."""

STAND_INS = ("triton", "triton.language")
"""Modules that trees import but parsing does not need, and that some machines cannot install."""

Row = dict[str, Any]
Arguments = dict[str, Row]
"""Arguments of one release by their first spelling."""


class _Built(Exception):
    """Raised when Megatron-LM calls its parser, which is then complete."""


def main() -> None:
    """Write the table for the command line's trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path)
    parser.add_argument("--flagscale", type=Path)
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--read", type=Path, help="print the arguments of this tree as JSON")
    parser.add_argument("commits", nargs="*")
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_tree(options.read)))
        return
    releases, sources = {}, {}
    for commit in options.commits:
        with tempfile.TemporaryDirectory() as folder:
            extract(options.repository, commit, Path(folder))
            tag = re.fullmatch(r"core_v([\d.]+)", commit)  # the files of some tags name another release
            release = tag[1] if tag else version(Path(folder))
            releases[release] = in_a_process(Path(folder))
            sources[release] = git(options.repository, "rev-parse", f"{commit}^{{commit}}").decode().strip()
    tree = options.flagscale / "third_party" / "Megatron-LM"
    fork = in_a_process(tree, options.flagscale)
    sources[FORK] = f"flag-scale wheel {wheel_version(options.flagscale)}, Megatron-LM {version(tree)}"
    fork_base = base(version(tree), releases)
    text = render(sources, fork_base, table(releases, fork, fork_base))
    options.output.write_text(text, encoding="utf-8")


def git(repository: Path, *words: str) -> bytes:
    """Return the output of git."""
    return subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True).stdout


def extract(repository: Path, commit: str, folder: Path) -> None:
    """Write the package of a commit into a folder."""
    with tarfile.open(fileobj=BytesIO(git(repository, "archive", commit, *PARTS))) as archive:
        archive.extractall(folder, filter="data")


def version(tree: Path) -> str:
    """Return a tree's release from `megatron/core/package_info.py`."""
    text = (tree / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?$", text, re.MULTILINE))
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}{found['PRE_RELEASE']}"


def wheel_version(folder: Path) -> str:
    """Return the version of the wheel that installed a package."""
    name = next(folder.parent.glob("flag_scale-*.dist-info")).name
    return name.removeprefix("flag_scale-").removesuffix(".dist-info")


def base(fork: str, releases: Iterable[str]) -> str:
    """Return the release at the start of a fork's version."""
    return next(release for release in releases if fork.startswith(release))


def in_a_process(tree: Path, *further: Path) -> Arguments:
    """Return the arguments of a tree, read in a separate process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, *further))), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--read", str(tree)]
    printed = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    found: Arguments = json.loads(printed.splitlines()[-1])
    return found


def read_tree(tree: Path) -> Arguments:
    """Return the arguments of the tree that this process imports, including those for modelopt."""
    importlib.import_module("torch._inductor.runtime.triton_heuristics")  # asks for triton: before it has a stand-in
    if not hasattr(typing, "override"):  # trees from 0.18 on are written for Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    for name in STAND_INS:
        sys.modules.setdefault(name, MagicMock(__spec__=None, __path__=[], __version__="3.0"))
    from megatron.training import arguments  # type: ignore[import-not-found]

    found = read_parser(_parser(arguments, None))
    if (tree / "megatron" / "post_training" / "arguments.py").is_file():
        from megatron.post_training.arguments import add_modelopt_args  # type: ignore[import-not-found]

        further = read_parser(_parser(arguments, add_modelopt_args))
        found |= {flag: row for flag, row in further.items() if flag not in found}
    return found


def _parser(arguments: Any, provider: Any) -> argparse.ArgumentParser:
    built: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *given: object, **named: object) -> None:
        built.append(self)
        raise _Built

    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = stop  # type: ignore[method-assign,assignment]
    try:
        arguments.parse_args(provider)
    except _Built:
        pass
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    return built[0]


def read_parser(parser: argparse.ArgumentParser) -> Arguments:
    """Return the arguments of a parser."""
    rows: Arguments = {}
    for action in parser._actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            on = [flag for flag in action.option_strings if not flag.startswith("--no-")]
            off = [flag for flag in action.option_strings if flag.startswith("--no-")]
            for flags, stores in ((on, True), (off, False)):
                rows[flags[0]] = _shortened(flags, action.dest, {"values": 0, "stores": stores}, action.default)
            continue
        rows[action.option_strings[0]] = _row(action)
    return rows


def _row(action: argparse.Action) -> Row:
    if action.nargs == 0:
        kind = {argparse._StoreTrueAction: True, argparse._StoreFalseAction: False}
        stores = kind.get(type(action), _plain(action.const))
        return _shortened(list(action.option_strings), action.dest, {"values": 0, "stores": stores}, action.default)
    row: Row = {"values": 1 if action.nargs is None else action.nargs}
    choices = None if action.choices is None else [_plain(choice) for choice in action.choices]
    if action.type in TYPES:
        row["type"] = TYPES[action.type]
    if choices is not None:
        row["choices"] = choices
    if action.nargs == "?" and action.const is not None:
        row["const"] = _plain(action.const)
    if isinstance(action, argparse._AppendAction):
        row["appends"] = True
    return _shortened(list(action.option_strings), action.dest, row, action.default)


def _shortened(flags: list[str], dest: str, row: Row, default: object) -> Row:
    """Return a row without values that follow from its flag: the destination, one value, a switch that stores true."""
    first = next((flag for flag in flags if flag.startswith("--")), flags[0])
    if dest != first.lstrip("-").replace("-", "_"):
        row["dest"] = dest
    if row["values"] == 1:
        del row["values"]
    if row.get("stores") is True:
        del row["stores"]
    plain = _plain(default)
    if plain is not None and not (row.get("values") == 0 and plain is False):
        row["default"] = plain
    return {"flags": flags} | row


def _plain(value: object) -> Any:
    """Return a value for JSON: a member of an enumeration by its name, other objects as None."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def table(releases: Mapping[str, Arguments], fork: Arguments, fork_base: str) -> list[Row]:
    """Return all different rows, with their releases as a PEP 440 specifier unless all releases have the row."""
    names = list(releases)
    variants: dict[str, Row] = {}
    having: dict[str, set[str]] = {}
    for name, arguments in (*releases.items(), (FORK, fork)):
        for row in arguments.values():
            text = json.dumps(row, sort_keys=True)
            variants[text] = row
            having.setdefault(text, set()).add(name)
    result: list[Row] = []
    for text, row in variants.items():
        runs = list(_runs(names, having[text]))
        in_fork, of_base = FORK in having[text], fork_base in having[text]
        if not runs:
            result.append(row | {FORK: "only"})
        for run in runs:
            changes = {} if len(run) == len(names) else {"releases": _specifier(names, run)}
            if in_fork and not of_base and run is runs[-1]:
                changes[FORK] = "also"
            if not in_fork and fork_base in run:
                changes[FORK] = "not"
            result.append(row | changes)
    return sorted(result, key=lambda row: str(row["flags"][0]))


def _runs(names: list[str], having: Iterable[str]) -> Iterable[list[str]]:
    """Yield the groups of consecutive releases that have a row."""
    run: list[str] = []
    for name in names:
        if name in having:
            run.append(name)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _specifier(names: list[str], run: list[str]) -> str:
    parts = [f">={run[0]}"] if run[0] != names[0] else []
    if run[-1] != names[-1]:
        parts.append(f"<{names[names.index(run[-1]) + 1]}")
    return ",".join(parts)


def render(sources: Mapping[str, str], fork_base: str, rows: list[Row]) -> str:
    """Return the table as JSON, one argument per line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'"sources": {json.dumps(sources, indent=1)},\n"base": {json.dumps({FORK: fork_base})}'
    return f'{{{head},\n"arguments": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    main()
