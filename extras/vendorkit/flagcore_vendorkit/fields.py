"""Reads YAML files of a plugin as dataclasses, and reports errors with file, key and value.

`Scope` is the part of an entry that restricts it to engines, chips and engine releases.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from flagcore.domain.chip import Chip
from flagcore.domain.files import read_regular
from flagcore.domain.knob import in_versions
from flagcore.errors import RunError, SpecError, join_errors
from flagcore.spec.plain_data import parse_yaml

SOURCE_KEYS = {"measured": "how", "datasheet": "document", "published": "where", "estimated": "method"}
"""The key that each kind of source requires."""
WORDS = {
    **dict.fromkeys(("dataclass_type", "dict_type"), "a mapping"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""The names of types in messages, by pydantic's types of errors."""
FIX = "see docs/plugin-data.md for the keys"

Content = dict[str, Any]
T = TypeVar("T")


def read_yaml(text: str, file: str) -> Content:
    """Return the content of a file. Each mapping under `source` or `effect` is converted to the fields of a Source.

    Raises SpecError with `file` if it is not YAML, not a mapping, or contains an invalid source.
    """
    content = _with_sources(parse_yaml(text, file=file), file, "")
    if not isinstance(content, dict):
        raise SpecError(file=file, key="the file", value=content, problem="must be a mapping")
    return content


def documents(text: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each YAML document of a file of chips: after the first one, the name has the chip.

    A text begins with as many empty lines as are before it, so that errors name the lines of the file.
    """
    lines = 0
    for part in text.split("\n---\n"):
        chip = re.search(r"(?m)^chip: *[\"']?([^\"'#\n]*[^\"'#\s])", part)
        yield f"{file} ({chip[1]})" if lines and chip else file, "\n" * lines + part
        lines += part.count("\n") + 2


def read_file(package: str, name: str) -> Content | None:
    """Return the content of a file of `package`, or None if there is no file. Raises SpecError like `read_yaml`."""
    path = files(package).joinpath(name)
    return read_yaml(path.read_text("utf-8"), f"{package}/{name}") if path.is_file() else None


def read_as(kind: Callable[..., T], package: str, name: str) -> T:
    """Return the content of a file of `package` as an instance of `kind`. A missing file counts as empty.

    Raises SpecError with all problems.
    """
    content = read_file(package, name) or {}
    built: T = build(kind, {key: value for key, value in content.items() if value is not None}, f"{package}/{name}")
    return built


def entries(content: Content, section: str, file: str) -> Iterator[tuple[str, Content]]:
    """Yield each mapping of the list `section`, and the path before its keys. Raises SpecError for another type."""
    for place, entry in enumerate(build(list[Any], content.pop(section, None) or [], file, section)):
        path = f"{section}[{place}]."
        yield path, dict(build(Mapping[str, Any], entry, file, path))


def finish(content: Content, file: str, fix: str = FIX) -> None:
    """Raise SpecError if `content` still contains keys, which are unknown."""
    if content:
        raise join_errors([SpecError(file=file, key=str(key), problem="unknown key", fix=fix) for key in content])


def build(kind: Any, content: Any, file: str, path: str = "", names: Mapping[str, str] | None = None) -> Any:
    """Return `content` as an instance of `kind`, a dataclass or another type. Raises SpecError with all problems.

    `path`: the path of the content in the file, with a dot at its end.
    `names`: the names of fields by their keys in the file.
    """
    if names is not None and isinstance(content, Mapping):
        content = {names.get(key, f"{key}?"): value for key, value in content.items()}
    try:
        (built,) = _adapter(kind).validate_json(json.dumps([content], default=str))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    else:
        return built
    keys = {field: key for key, field in (names or {}).items()}
    raise join_errors([_problem(each, file, path, keys) for each in problems])


def read_record(kind: type[T], path: Path, schema: int, what: str, fix: str) -> T:
    """Return a record that flagcore saved as JSON, a dataclass `kind`. Raises RunError, which has `what` it is."""
    try:
        data = json.loads(read_regular(path))
        if data.pop("schema") != schema:
            raise ValueError(f"the schema is not {schema}")
        record: T = build(kind, data, str(path))
        return record
    except (SpecError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"cannot read the {what} {path} ({error}); {fix}, or delete the file") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return a pydantic adapter that reads a `kind` from JSON, with the strict types of YAML.

    It reads a list of one element, because pydantic does not accept a configuration for a dataclass alone.
    """
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _problem(error: Any, file: str, path: str, keys: Mapping[str, str]) -> SpecError:
    parts = [str(part) for part in error["loc"][1:]] or [""]
    below = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts[1:])
    key, value = f"{path}{keys.get(parts[0], parts[0])}{below}".rstrip(".?"), error["input"]
    if error["type"] == "missing" or (value is None and not error["loc"][1:]):
        return SpecError(file=file, key=key, problem="is missing", fix=FIX)
    if error["type"] == "unexpected_keyword_argument":
        return SpecError(file=file, key=key, problem="unknown key", fix=FIX)
    if error["type"] in ("literal_error", "enum"):
        return SpecError(
            file=file, key=key, value=value, problem="invalid value", fix=f"use {error['ctx']['expected']}"
        )
    words = WORDS.get(error["type"])
    problem = f"must be {words}" if words else error["msg"].replace("Input should", "must")
    return SpecError(file=file, key=key, value=value, problem=problem)


def _with_sources(content: Any, file: str, path: str) -> Any:
    if isinstance(content, list):
        return [_with_sources(each, file, f"{path.rstrip('.')}[{place}].") for place, each in enumerate(content)]
    if not isinstance(content, dict):
        return content
    fields = {}
    for key, value in content.items():
        is_source = key in ("source", "effect") and isinstance(value, Mapping)
        fields[key] = (_source if is_source else _with_sources)(value, file, f"{path}{key}.")
    return fields


def _source(content: Mapping[str, Any], file: str, path: str) -> dict[str, str]:
    """Return the fields of a Source from a mapping under `source` or `effect`. Raises SpecError."""

    def wrong(key: str, problem: str, fix: str) -> SpecError:
        return SpecError(file=file, key=f"{path}{key}", value=content.get(key), problem=problem, fix=fix)

    kind = content.get("kind")
    if kind not in SOURCE_KEYS:
        raise wrong("kind", "invalid value", f"use one of {', '.join(SOURCE_KEYS)}")
    needed, others = SOURCE_KEYS[kind], {key: value for key, value in content.items() if key != "kind"}
    detail = others.pop(needed, None)
    if not isinstance(detail, str) or not detail.strip():
        raise wrong(needed, f"must be a string, which sources of the kind {kind} require", f"write {needed}: TEXT")
    for name, value in others.items():
        if value is None:
            raise wrong(repr(name), "has no value", f'put a text with a comma in quotes: {needed}: "{detail}, {name}"')
    details = (str(value) if name == "confidence" else f"{name} {value}" for name, value in others.items())
    return {"kind": kind, "detail": ", ".join([detail, *details])}


Kind = Literal["train", "serve", "rl"]
"""The kind of an engine: for training, for serving, or for reinforcement learning, which does both."""
KINDS: tuple[str, ...] = get_args(Kind)


def _several(words: object) -> object:
    return (words,) if isinstance(words, str) else tuple(words) if isinstance(words, list) else words


def _range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError('invalid range of releases; write e.g. ">=0.11,<0.13"') from None
    return text


_NUMBERED = re.compile(r"v?\d+(\.\d+|\.?(a|b|rc|post|dev)\d*)*(?![\w.])")
_NEWEST = "9999"


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The engines, kinds of engines, chips and engine releases to which an entry applies. An empty field means all.

    `versions` is a range such as ">=0.11,<0.13"; an unknown release is the newest. In a file, `engine` may be written
    instead of `engines`.
    """

    engines: Annotated[
        tuple[str, ...], Field(validation_alias=AliasChoices("engines", "engine")), BeforeValidator(_several)
    ] = ()
    kinds: tuple[Kind, ...] = ()
    chips: tuple[str, ...] = ()
    versions: Annotated[str, AfterValidator(_range)] = ""

    def includes(self, chip: Chip, engine: str, engine_version: str | None = None, kind: str = "") -> bool:
        """Return whether the entry applies. None, or a word such as "nightly", is the newest release of the engine."""
        return (
            (not self.engines or engine in self.engines)
            and (not self.kinds or kind in self.kinds)
            and (not self.chips or chip.name in self.chips)
            and in_versions(self.versions, engine_version if _NUMBERED.match(engine_version or "") else _NEWEST)
        )


S = TypeVar("S", bound=Scope)


def applicable(
    entries: Iterable[S], chip: Chip, engine: str, engine_version: str | None = None, kind: str = ""
) -> tuple[S, ...]:
    """Return the entries that apply to an engine on a chip, in their order."""
    return tuple(each for each in entries if each.includes(chip, engine, engine_version, kind))
