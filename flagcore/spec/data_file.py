"""Reads YAML and JSON files into plain data, and writes YAML.

YAML has the core schema of YAML 1.2, like most editors, whereas PyYAML has that of YAML 1.1: `on`, `yes` and `1:30` are
text, and `1e3` is a number. Other tags, merge keys, duplicate keys and several documents in a file are errors.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Hashable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml

from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore.spec.plain_data import MAX_DEPTH, plain, spec_error

MAX_BYTES = 1 << 20


def spec_as_data(path: Path) -> dict[str, Any]:
    """Read a spec file without validating its keys. The result is JSON-serialisable. Raises SpecError."""
    return read_mapping(path, file=str(path))


def read_mapping(path: Path, *, file: str, key: str = "file") -> dict[str, Any]:
    """Return the mapping in a JSON file, if its suffix is `.json`, or in a YAML file. Raises SpecError.

    `file` is the name of the file in errors, and `key` the key of the spec that names it.
    """
    text = read_text(path, file=file, key=key)
    if path.suffix.lower() == ".json":
        try:
            data = plain(load_json(text.strip() or "null"), file=file)
        except ValueError as error:
            raise spec_error("the document", str(error), file=file) from None
    else:
        data = plain(parse_yaml(text, file=file), file=file)
    if data is None:
        raise spec_error(key, _("is empty"), fix=_("write a mapping of keys and values"), file=file)
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping of keys and values"), value=data, file=file)
    return data


def read_text(path: Path, *, file: str, key: str) -> str:
    """Return the text of a regular UTF-8 file of at most 1 MiB. Does not block on pipes. Raises SpecError."""

    def error_of(problem: str, fix: str) -> SpecError:
        return spec_error(key, problem, value=str(path) if str(path) != file else None, fix=fix, file=file)

    content, problem, fix = b"", "", _("give the path of a file that can be read")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                problem = _("is not a regular file")
            else:
                content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        problem = _("does not exist")
        fix = _("did you mean {name}?", name=similar) if (similar := _similar_file(path)) else fix
    except (OSError, ValueError) as error:
        problem = _("cannot be read ({why})", why=getattr(error, "strerror", None) or "not a path")
    if problem:
        raise error_of(problem, fix)
    if len(content) > MAX_BYTES:
        raise error_of(_("is larger than {size} MiB", size=MAX_BYTES >> 20), _("the file is too large"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start
    raise error_of(_("is not UTF-8 text (byte {place})", place=place), _("save it as UTF-8"))


def _similar_file(path: Path) -> Path | None:
    """Return the file in the same folder whose name is most similar to that of a missing file, or None."""
    try:
        (name,) = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except (OSError, ValueError):
        return None
    return path.with_name(name)


def load_json(text: str) -> Any:
    """Return the JSON document in `text`. Raises ValueError with the problem, also for duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"cannot be read as JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {duplicate[:64]!r} twice")
    return found


MAX_NODES = 20_000
_CORE = "tag:yaml.org,2002:"
_ONE_DOCUMENT = "expected a single document in the stream"


def parse_yaml(text: str, *, file: str) -> Any:
    """Return the single document in `text`, None if there is none. Raises SpecError with line and column.

    Aliases share objects, so use `plain` on the result.
    """
    loader, place, problem = None, "the document", ""
    try:
        loader = _Loader(text, file)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(mark) if mark else place
        problem = ": ".join(part[:100] for part in (error.context, error.problem) if part)
        if error.context == _ONE_DOCUMENT:
            problem = "a file must have one document, and a second one starts here"
    except yaml.reader.ReaderError as error:
        place, problem = f"character {error.position}", "a control character"
    except (ValueError, OverflowError):
        problem = "an escape sequence in a quoted text is invalid"
    finally:
        if loader is not None:
            loader.dispose()
    raise spec_error(place, _("cannot be read as YAML: {why}", why=problem), file=file)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and limits of nodes and depth, but without other tags and merge keys."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own declaration)
    yaml_constructors = {}  # noqa: RUF012

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self.file = file
        self.nodes = self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nodes += 1
        self.depth += 1
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            limit = f"more than {MAX_NODES:,} values" if self.nodes > MAX_NODES else f"more than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=limit, problem_mark=self.get_mark())
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self.error(key_node, "keys must be strings", fix="quote the key")
            if key == "<<":
                raise self.error(key_node, "has a merge key (<<), which is not supported", fix="expand the alias")
            if key in found:
                raise self.error(key_node, f"repeats the key {key[:60]!r}", fix="keep one of them")
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_plain(self, node: yaml.ScalarNode) -> bool | int | float:
        kind, text = node.tag.removeprefix(_CORE), node.value.lower()
        try:
            if kind == "bool":
                return {"true": True, "false": False}[text]
            if kind == "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        except (ValueError, KeyError):
            raise self.error(node, f"has a value that cannot be read as {kind}: {text[:40]!r}") from None

    def refuse_tag(self, node: yaml.Node) -> NoReturn:
        raise self.error(node, f"has the tag {node.tag[:60]}, which is not supported", fix="remove the tag")

    def error(self, node: yaml.Node, problem: str, *, fix: str = "") -> SpecError:
        return spec_error(_place(node.start_mark), problem, fix=fix, file=self.file)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 or 1.2 would read as another type, such as 3e-05."""


def dump_yaml(data: object, **options: Any) -> str:
    """Return plain data as YAML with its keys in order. `options` are those of `yaml.dump`."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options))


for _kind, _pattern, _first in (
    ("null", r"(?:null|Null|NULL|~|)", ["n", "N", "~", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_CORE + _kind, re.compile(_pattern + r"\Z"), _first)
for _kind in ("null", "str", "seq", "map"):
    _Loader.add_constructor(_CORE + _kind, yaml.SafeLoader.yaml_constructors[_CORE + _kind])
for _kind in ("bool", "int", "float"):
    _Loader.add_constructor(_CORE + _kind, _Loader.construct_plain)
_Loader.add_constructor(None, _Loader.refuse_tag)


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
