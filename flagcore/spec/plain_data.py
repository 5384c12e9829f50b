"""Reads plain data, which means JSON-like values of limited size, from YAML and JSON files, and reports errors in it.

YAML is read with the core schema of YAML 1.2, like in most editors, and not with PyYAML's schema of YAML 1.1. So `on`,
`yes` and `1:30` are text, and `1e3` is a number. Tags outside this schema, merge keys, duplicate keys and several
documents in a file are errors.
"""

import json
import os
import re
import stat
from collections.abc import Hashable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import yaml

from flagcore.errors import SpecError
from flagcore.i18n import _

MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_MESSAGE = 400
_MAX_INT = 2**63
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")

KeyPath = tuple["str | int", ...]


def spec_error(key: KeyPath | str, problem: str, *, value: object = None, fix: str = "", file: str = "") -> SpecError:
    """Return a SpecError with a message of one line. Long parts are cut so that it has about MAX_MESSAGE characters."""
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
    """Return a deep copy of `value` that consists only of dict, list, str, int, float, bool and None.

    Raises SpecError for other types, more than MAX_DEPTH levels or MAX_VALUES values, integers beyond 64 bits,
    infinities, NaN and control characters.
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


MAX_BYTES = 1 << 20


def spec_as_data(path: Path) -> dict[str, Any]:
    """Return the content of a spec file as JSON-serialisable data, without validating its keys. Raises SpecError."""
    return read_mapping(path, file=str(path))


def read_mapping(path: Path, *, file: str, key: str = "file") -> dict[str, Any]:
    """Return the mapping in a file. It is read as JSON if its suffix is `.json`, else as YAML. Raises SpecError.

    `file`: the name of the file in errors.
    `key`: the key of the spec that names the file, for errors.
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
    """Return the text of a UTF-8 file. Raises SpecError for other files, and for files larger than MAX_BYTES.

    Does not block on pipes.
    """

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
    """Return the file in the same folder with the name most similar to a missing file's name, or None."""
    try:
        (name,) = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except (OSError, ValueError):
        return None
    return path.with_name(name)


def load_json(text: str) -> Any:
    """Return the JSON document in `text`. Raises ValueError with a description if it is invalid or repeats a key."""
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
    """Return the only YAML document in `text`, or None if there is none. Raises SpecError with line and column.

    Aliases in the result share objects, so pass it through `plain`.
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
    """A SafeLoader with the scalar types of YAML 1.2 and limits on size and depth. It rejects all other tags."""

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
    """A SafeDumper that quotes text which YAML 1.1 or 1.2 would read as another type, such as 3e-05."""


def dump_yaml(data: object, **options: Any) -> str:
    """Return plain data as YAML, with keys in their given order. `options` are passed to `yaml.dump`."""
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
