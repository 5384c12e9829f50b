"""YAML text into Python objects: the core schema of YAML 1.2, as editors and JSON read it, and nothing executed.

So `on`, `yes` and `1:30` are text and `1e3` is a number (PyYAML's own schema is YAML 1.1). Tags other than
those of the core schema, merge keys, duplicate keys and several documents in a file are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from flagcore.errors import SpecError
from flagcore.spec.plain_data import MAX_DEPTH, spec_error

MAX_NODES = 20_000
_CORE = "tag:yaml.org,2002:"
_ONE_DOCUMENT = "expected a single document in the stream"


def parse_yaml(text: str, *, file: str) -> Any:
    """Return the one document in `text`, None if there is none. Aliases share objects, so use `plain` on the result.

    Raises SpecError that names line and column.
    """
    loader, place, problem = None, "the document", ""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Build(file).of(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(mark) if mark else place
        problem = ": ".join(part[:100] for part in (error.context, error.problem) if part)
        if error.context == _ONE_DOCUMENT:
            problem = "a file holds one document, a second one starts here"
    except yaml.reader.ReaderError as error:
        place, problem = f"character {error.position}", "a control character"
    except (ValueError, OverflowError):
        problem = "an escape in a quoted text names no character"
    finally:
        if loader is not None:
            loader.dispose()
    raise spec_error(place, f"cannot be read as YAML: {problem}", file=file)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and a bound on nodes and depth. Used to compose, never to construct."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own declaration)

    def __init__(self, text: str) -> None:
        super().__init__(text)
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
    _Loader.add_implicit_resolver(_CORE + _kind, re.compile(_pattern + r"\Z"), _first)


class _Build:
    """From nodes to objects. An alias gives the same object again, so a bomb stays as small as its text."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.done: dict[int, Any] = {}

    def of(self, node: yaml.Node) -> Any:
        if id(node) in self.done:
            return self.done[id(node)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
            items: list[Any] = []
            self.done[id(node)] = items
            items.extend(self.of(item) for item in node.value)
            return items
        if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
            return self.mapping(node)
        raise self.error(node, f"has the tag {node.tag[:60]}, which is not supported", fix="remove the tag")

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.done[id(node)] = found
        for key_node, value_node in node.value:
            key = self.of(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self.error(key_node, "has a key that is not text", fix="quote the key")
            if key == "<<":
                raise self.error(key_node, "has a merge key (<<), which is not supported", fix="write the keys out")
            if key in found:
                raise self.error(key_node, f"gives the key {key[:60]!r} a second time", fix="keep one of them")
            found[key] = self.of(value_node)
        return found

    def scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_CORE), node.value
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            raise self.error(node, f"has a value that cannot be read as {kind}: {text[:40]!r}") from None
        raise self.error(node, f"has the tag {node.tag[:60]}, which is not supported", fix="remove the tag")

    def error(self, node: yaml.Node, problem: str, *, fix: str = "") -> SpecError:
        return spec_error(_place(node.start_mark), problem, fix=fix, file=self.file)


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
