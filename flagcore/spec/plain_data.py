"""Reads plain data, which means JSON-like values of limited size, from YAML and JSON files, and reports errors in it.

YAML is read with the core schema of YAML 1.2, like in most editors, and not with PyYAML's schema of YAML 1.1. So `on`,
`yes` and `1:30` are text, and `1e3` is a number. Tags outside this schema, merge keys, duplicate keys and several
documents in a file are errors.

Importers find helpers here: notes and errors about the keys of another tool, and the spec as commented YAML.
"""

import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from flagcore.contracts import ImportedSpec
from flagcore.domain.files import read_all, read_regular
from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError
from flagcore.i18n import _, closest

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
    name, problem, fix, file = (
        _UNPRINTABLE.sub("?", re.sub(r"\s+", " ", text[:10_000])) for text in (name, problem, fix, file)
    )
    error = SpecError(key=name, problem=problem, value=value, fix=fix, file=file)
    if len(str(error)) < MAX_MESSAGE:
        return error
    return SpecError(
        key=_shorten_start(name, 60),
        problem=_shorten_end(problem, 110 if fix else 190),
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
    count = 0

    def copy(value: Any, path: KeyPath) -> Any:
        nonlocal count
        count += 1
        problem, fix = _problem_of(value)
        if count > MAX_VALUES:  # aliases of YAML can multiply values
            problem, fix = f"has more than {MAX_VALUES:,} values", "write fewer keys, or fewer aliases"
        elif len(path) > MAX_DEPTH:
            problem, fix = f"is nested more than {MAX_DEPTH} deep, or contains itself", "flatten it"
        if problem:
            shown = value if isinstance(value, (str, int, float)) else None
            raise spec_error(path, problem, value=shown, fix=fix, file=file)
        if value is None or isinstance(value, (str, int, float)):
            return value
        if isinstance(value, Mapping):
            return {key: copy(item, (*path, key)) for key, item in value.items()}
        return [copy(item, (*path, index)) for index, item in enumerate(value)]

    return copy(value, ())


def _problem_of(value: object) -> tuple[str, str]:
    """Return why `value` is not plain data, and how to fix it. Both are empty if it is."""
    if isinstance(value, str):
        return ("contains a control character", "remove it") if _UNPRINTABLE.search(value) else ("", "")
    if isinstance(value, int):
        return ("has too many digits", "use a number below 2**63") if not -_MAX_INT <= value < _MAX_INT else ("", "")
    if isinstance(value, float):
        return ("", "") if isfinite(value) else ("is not finite", "use a finite number")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                return f"has a key of type {type(key).__name__}", "keys must be strings: quote it"
            if _UNPRINTABLE.search(key):
                return f"has a control character in its key {key[:60]!r}", "remove it"
    elif value is not None and (not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray))):
        return f"is of type {type(value).__name__}", "use text, a number, true, false, null, a list or a mapping"
    return "", ""


def _shorten_end(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


def _shorten_start(text: str, size: int) -> str:
    return text if len(text) <= size else "..." + text[len(text) - size + 3 :]


MAX_BYTES = 1 << 22


def spec_as_data(path: Path) -> dict[str, Any]:
    """Return the content of a spec file as JSON-serialisable data, without validating its keys. Raises SpecError."""
    data = read_mapping(path, file=str(path))
    if "model_type" in data:
        fix = _("give its folder as model, or plan it: flag estimate --model {folder} --chip CHIP", folder=path.parent)
        raise spec_error("", _("is the config.json of a model, not a spec"), fix=fix, file=str(path))
    return data


def read_mapping(path: Path, *, file: str, key: str = "file") -> dict[str, Any]:
    """Return the mapping in a file. It is read as JSON if its suffix is `.json`, else as YAML. Raises SpecError.

    `file`: the name of the file in errors.
    `key`: the key of the spec that names the file, for errors.
    """
    return mapping_of(read_text(path, file=file, key=key), file=file, key=key)


def mapping_of(text: str, *, file: str, key: str = "file") -> dict[str, Any]:
    """Return the mapping in the text of a file, as `read_mapping` does. Raises SpecError."""
    if file.lower().endswith(".json"):
        try:
            data = plain(load_json(text.strip() or "null"), file=file)
        except ValueError as error:
            raise spec_error("the document", str(error), file=file) from None
    else:
        data = parse_yaml(text, file=file)
    if data is None:
        raise spec_error(key, _("is empty"), fix=_("write a mapping of keys and values"), file=file)
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping of keys and values"), value=data, file=file)
    return data


def read_text(path: Path, *, file: str, key: str) -> str:
    """Return the text of a UTF-8 file, or of stdin if `file` is `-`.

    Raises SpecError for other files, and for more than MAX_BYTES. Does not block on other pipes than stdin.
    """
    fix = _("give the path of a file that can be read")
    try:
        data = read_all(sys.stdin.buffer, MAX_BYTES) if file == "-" else read_regular(path, MAX_BYTES)
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        problem = _("is a link to a missing file") if path.is_symlink() else _("does not exist")
        fix = _("did you mean {name}?", name=similar) if (similar := _similar_file(path)) else fix
    except UnicodeDecodeError as error:
        problem, fix = _("is not UTF-8 text (byte {place})", place=error.start), _("save it as UTF-8")
    except (OSError, ValueError) as error:
        problem = _("cannot be read ({why})", why=getattr(error, "strerror", None) or "not a path")
    raise spec_error(key, problem, value=str(path) if str(path) != file else None, fix=fix, file=file)


def _similar_file(path: Path) -> Path | None:
    """Return the file in the same folder with the name most similar to a missing file's name, or None."""
    try:
        names = {Path(each).stem: each for each in os.listdir(path.parent) if each != path.name}
    except (OSError, ValueError):
        return None
    return path.with_name(names[name]) if (name := closest(path.stem, names)) else None


def load_json(text: str) -> Any:
    """Return the JSON document in `text`. Raises ValueError with a description if it is invalid or repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"cannot be read as JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _constant(name: str) -> str | float:
    """Return Infinity as text: files of models have limits of this size. NaN stays a number, which `plain` refuses."""
    return float(name) if name == "NaN" else name


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((duplicate, _number),) = Counter(name for name, _value in pairs).most_common(1)
        raise ValueError(f"has the key {duplicate[:64]!r} twice")
    return found


def parse_yaml(text: str, *, file: str) -> Any:
    """Return the only YAML document in `text` as plain data, or None if there is none. Raises SpecError.

    Errors name the line and column.
    """
    place = "the document"
    try:
        return plain(yaml.load(text, _Loader), file=file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else place
        problem = ": ".join(part[:100] for part in (error.context, error.problem) if part)
    except yaml.reader.ReaderError as error:
        place, problem = f"character {error.position}", "a control character"
    except RecursionError:
        problem = "it is nested too deep"
    except (ValueError, OverflowError) as error:
        problem = f"a value is invalid: {error}"
    raise spec_error(place, _("cannot be read as YAML: {why}", why=problem), file=file)


def package_yaml(package: str, name: str) -> Any:
    """Return the content of a YAML file that is part of a Python package."""
    return yaml.load(files(package).joinpath(name).read_text("utf-8"), _Loader)


SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml, ten times as slow


class _Loader(SafeLoader):  # type: ignore[misc]
    """A SafeLoader with the scalar types of YAML 1.2 and integer keys. It rejects other tags and duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration)
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if key_node.tag == _CORE + "int" else self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in found:
                problem = "keys must be strings: quote the key"
                if isinstance(key, str):
                    problem = f"the key {key} is repeated"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Return an integer. YAML 1.2 writes octal numbers as 0o17, and 017 is 17."""
        return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)


_CORE = "tag:yaml.org,2002:"


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes strings which YAML 1.1 or 1.2 would read as another type, such as 3e-05."""


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
for _tag in (None, *(_CORE + kind for kind in ("null", "bool", "float", "str", "seq", "map"))):
    _Loader.add_constructor(_tag, yaml.SafeLoader.yaml_constructors[_tag])  # that of None rejects all other tags
_Loader.add_constructor(_CORE + "int", _Loader.construct_integer)


WIDTH = 110


class Notes:
    """Collects the notes and the errors of an import from `file`."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.notes: list[ImportNote] = []
        self._known = set[ImportNote]()
        self.problems: list[SpecError] = []

    def note(self, key: str, text: str, at: str = "") -> None:
        """Add a note on a key of the other tuner, unless it is a duplicate.

        `at`: the related key of the spec. Empty if there is none.
        """
        if (note := ImportNote(key, " ".join(text.split()), at)) not in self._known:
            self._known.add(note)
            self.notes.append(note)

    def error(self, key: str, problem: str, *, value: object = None, fix: str = "") -> SpecError:
        """Return an error about a key of the file."""
        return spec_error(key, problem, value=value, fix=fix, file=self.file)

    def report(self, key: str, problem: str, *, value: object = None, fix: str = "") -> None:
        """Add an error about a key of the file. The import raises all errors together when it ends."""
        self.problems.append(self.error(key, problem, value=value, fix=fix))


def commented_yaml(spec: ImportedSpec) -> str:
    """Return an imported spec as YAML, with its notes as comments.

    Each note is above its key or, if the data lack the key, above the innermost section that would contain it.
    """
    notes_by_key: dict[str, list[ImportNote]] = {}
    for note in spec.notes:
        key = note.at
        while key and not _has_key(spec.data, key):
            key = key.rpartition(".")[0]
        notes_by_key.setdefault(key, []).append(note)
    return "\n".join([*_comments(notes_by_key.get("", []), 0), *_lines(spec.data, "", notes_by_key)]) + "\n"


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if a part of the key is missing."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _has_key(data: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _lines(data: Mapping[str, Any], path: str, notes_by_key: Mapping[str, list[ImportNote]]) -> Iterator[str]:
    depth = path.count(".") + 1 if path else 0
    for key, value in data.items():
        key_path = f"{path}.{key}" if path else key
        yield from _comments(notes_by_key.get(key_path, []), depth)
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(value, key_path, notes_by_key)
        else:
            flow = isinstance(value, list)
            text = dump_yaml({key: value}, default_flow_style=None if flow else False, width=math.inf)
            yield from ("  " * depth + line for line in text.splitlines())


def _comments(notes: Iterable[ImportNote], depth: int) -> Iterator[str]:
    indent = "  " * depth + "# "
    for note in notes:
        yield from textwrap.wrap(
            str(note), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
        )
