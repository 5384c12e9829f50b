"""Renders the templates of a Helm chart without helm: the part of Go's template language that charts of servers use.

Sources: https://pkg.go.dev/text/template and https://helm.sh/docs/chart_template_guide/function_list/.
"""

import json
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from flagcore.domain.files import read_regular
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import dump_yaml

_ACTION = re.compile(r"(\{\{-?(?:.|\n)*?-?\}\})")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|`[^`]*`|:=|[()|=,]|[^\s()|=,:]+')
_FAILURES = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError
_DEEPEST, _LONGEST = 40, 1000
"""Limits of nested templates, and of the elements of a generated list."""


def chart_of(file: Path, text: str) -> Path | None:
    """Return the folder of the chart if a file with this text has its values, or is one of its templates; else None."""
    is_values = file.suffix in (".yaml", ".yml") and not re.search(r"(?m)^(kind|services|apiVersion):", text)
    places = [*file.parents][:3] if file.is_file() and (is_values or "{{" in text) else ()
    return next((each for each in places if (each / "templates").is_dir() and (each / "Chart.yaml").is_file()), None)


def rendered_chart(chart: Path, file: Path) -> str:
    """Return the manifests of a chart with the values of `file`, if it is not a template. Raises UsageError."""
    values: dict[str, Any] = {}
    for each in dict.fromkeys([chart / "values.yaml", *([] if "templates" in file.parts else [file])]):
        values = _merged(values, _mapping(each))
    named = {f"{key[:1].upper()}{key[1:]}": each for key, each in _mapping(chart / "Chart.yaml").items()}
    folder = chart / "templates"
    files = sorted(each for each in folder.rglob("*") if each.suffix in (".yaml", ".yml", ".tpl") and each.is_file())
    texts = {each: _text(each) for each in files if "tests" not in each.relative_to(folder).parts}
    template = _Template(chart, values, {"Name": chart.name, **named})
    nodes = {each: template.parsed(text) for each, text in texts.items()}
    parts = []
    for each in (each for each in texts if each.suffix != ".tpl"):
        try:
            part = template.rendered(nodes[each])
            list(yaml.safe_load_all(part))
            parts.append(part)
        except _FAILURES as e:
            if "containers:" in texts[each]:
                reason = " ".join(str(e).split())
                problem = _("{file} of the chart cannot be rendered here: {reason}", file=each.name, reason=reason)
                raise UsageError(f"{problem}; {_('give the manifests that `helm template` writes')}") from None
    return "\n---\n".join(parts) if any("image:" in each for each in parts) else ""


def _text(file: Path) -> str:
    return read_regular(file).decode("utf-8", errors="replace")


def _mapping(file: Path) -> dict[str, Any]:
    with suppress(OSError, yaml.YAMLError):
        found = yaml.safe_load(_text(file))
        return found if isinstance(found, dict) else {}
    return {}


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a chart overridden by others."""
    both = {key: _merged(old[key], new[key]) for key in old.keys() & new.keys()
            if isinstance(old[key], Mapping) and isinstance(new[key], Mapping)}  # fmt: skip
    return {**old, **new, **both}


def _shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _item(value: Any, key: Any) -> Any:
    known = value if isinstance(value, Mapping) else range(len(value or ()))
    return value[key] if key in known else None


def _number(value: Any) -> int:
    return int(float(value or 0))


_KINDS = {str: "string", bool: "bool", int: "int", float: "float64", list: "slice", dict: "map"}

# fmt: off
_FUNCTIONS: Mapping[str, Any] = {
    "default": lambda other, value=None: value or other, "coalesce": lambda *a: next(filter(None, a), None),
    "required": lambda _text, value: value, "ternary": lambda yes, no, test: yes if test else no,
    "empty": operator.not_, "not": operator.not_, "eq": lambda a, *b: a in b, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "len": len,
    "and": lambda *a: next((x for x in a if not x), a[-1]), "or": lambda *a: next((x for x in a if x), a[-1]),
    "quote": lambda *a: " ".join(json.dumps(_shown(x)) for x in a), "squote": lambda x: f"'{_shown(x)}'",
    "toYaml": lambda x: "" if x is None else dump_yaml(x).strip().removesuffix("\n..."),
    "toJson": json.dumps, "fromYaml": yaml.safe_load, "toString": _shown, "print": _shown,
    "printf": lambda text, *a: reduce(lambda t, x: re.sub("%[^a-z%]*[a-z]", lambda _m: _shown(x), t, count=1), a, text),
    "indent": lambda n, x: indent(_shown(x), " " * min(n, _DEEPEST)),
    "nindent": lambda n, x: "\n" + indent(_shown(x), " " * min(n, _DEEPEST)),
    "lower": lambda x: _shown(x).lower(), "upper": lambda x: _shown(x).upper(), "trim": lambda x: _shown(x).strip(),
    "trunc": lambda n, x: _shown(x)[:n], "trimSuffix": lambda end, x: _shown(x).removesuffix(end),
    "trimPrefix": lambda start, x: _shown(x).removeprefix(start), "replace": lambda a, b, x: _shown(x).replace(a, b),
    "contains": lambda part, x: part in _shown(x), "hasPrefix": lambda a, x: _shown(x).startswith(a),
    "hasSuffix": lambda a, x: _shown(x).endswith(a), "join": lambda by, x: by.join(map(_shown, x or ())),
    "splitList": lambda by, x: x.split(by), "list": lambda *a: [*a], "append": lambda x, new: [*x, new],
    "concat": lambda *a: [each for part in a for each in part or ()], "first": lambda x: x[0], "last": lambda x: x[-1],
    "dict": lambda *a: dict(zip(a[::2], a[1::2], strict=True)), "hasKey": lambda x, key: key in (x or {}),
    "get": lambda x, key: (x or {}).get(key, ""), "merge": lambda a, b: _merged(b, a), "keys": lambda x: [*x],
    "int": _number, "int64": _number, "float64": float, "add": lambda *a: sum(map(_number, a)),
    "add1": lambda x: _number(x) + 1, "sub": lambda a, b: _number(a) - _number(b),
    "max": lambda *a: max(map(_number, a)), "mul": lambda a, b: _number(a) * _number(b),
    "div": lambda a, b: _number(a) // _number(b),
    "until": lambda n: [*range(min(_number(n), _LONGEST))], "sha256sum": lambda _x: "", "b64enc": lambda _x: "",
    "true": True, "false": False, "nil": None, "lookup": lambda *_a: {},
    "kindIs": lambda kind, x: _KINDS.get(type(x)) == kind, "typeOf": lambda x: _KINDS[type(x)],
    "index": lambda x, *keys: reduce(_item, keys, x),
}
# fmt: on


class _Template:
    """The templates of a chart that have a name, and the evaluation of all of them."""

    def __init__(self, chart: Path, values: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self._named: dict[str, Any] = {}
        self._depth = 0
        release = {"Name": "release", "Namespace": "default", "Service": "Helm", "IsInstall": True}
        files = {"Get": lambda name: _text(chart / name) if not re.match(r"/|.*\.\.", name) else ""}
        about = {"Version": "0", "AppVersion": "latest", **about}
        version = {"Version": "v1.30.0", "GitVersion": "v1.30.0"}
        has = {"APIVersions": {"Has": lambda _name: False}, "KubeVersion": version}
        self._root = {"Values": values, "Chart": about, "Release": release, "Files": files, "Capabilities": has}

    def parsed(self, text: str) -> list[Any]:
        """Return the tree of a template: texts, expressions, and blocks with their branches."""
        pieces = _ACTION.split(text)
        for n in range(1, len(pieces), 2):
            if pieces[n].startswith("{{-"):
                pieces[n - 1] = pieces[n - 1].rstrip()
            if pieces[n].endswith("-}}"):
                pieces[n + 1] = pieces[n + 1].lstrip()
        return self._block(iter(enumerate(pieces)))[0]

    def _block(self, pieces: Iterator[tuple[int, str]]) -> tuple[list[Any], list[str]]:
        """Return the nodes up to the end of a block, or its `else`, and the tokens of what ended it."""
        nodes: list[Any] = []
        for n, piece in pieces:
            tokens = _TOKEN.findall(re.sub(r"^\{\{-?|-?\}\}$", "", piece)) if n % 2 else []
            if not n % 2:
                nodes.append(piece)
            elif "/*" in piece or not tokens:
                continue
            elif tokens[0] in ("end", "else"):
                return nodes, tokens
            elif tokens[0] in ("if", "with", "range", "define", "block"):
                body, ended = self._block(pieces)
                other = list[Any]()
                node = (tokens[0], tokens[1:], body, other)
                if tokens[0] in ("define", "block"):
                    self._named[tokens[1].strip('"`')] = body
                    continue
                while ended[:1] == ["else"]:
                    more, following = self._block(pieces)
                    inner = list[Any]()
                    other += [(ended[1], ended[2:], more, inner)] if ended[1:] else more
                    ended, other = following, inner if ended[1:] else other
                nodes.append(node)
            else:
                nodes.append(tokens)
        return nodes, []

    def rendered(self, nodes: list[Any], dot: Any = None, names: dict[str, Any] | None = None) -> str:
        """Return the text of a tree. `dot` and `names` are its context and its variables."""
        dot = self._root if dot is None and names is None else dot
        names = {"$": dot} if names is None else names
        return "".join(self._text_of(node, dot, names) for node in nodes)

    def _text_of(self, node: Any, dot: Any, names: dict[str, Any]) -> str:
        if isinstance(node, str):
            return node
        if isinstance(node, list):
            if len(node) > 1 and node[1] in (":=", "="):
                names[node[0]] = self._pipeline(node[2:], dot, names)
                return ""
            return _shown(self._pipeline([*node], dot, names))
        kind, tokens, body, other = node
        variables = [each for each in tokens[: tokens.index(":=")] if each != ","] if ":=" in tokens else []
        value = self._pipeline([*tokens[tokens.index(":=") + 1 if variables else 0 :]], dot, names)
        if not value:
            return self.rendered(other, dot, names)
        if kind == "range":
            rows = sorted(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
            parts = []
            for row in rows:
                names.update(zip(variables, row if len(variables) > 1 else row[1:], strict=False))
                parts.append(self.rendered(body, row[1], names))
            return "".join(parts)
        inner = {**names, **dict.fromkeys(variables, value)} if variables else names
        return self.rendered(body, value if kind == "with" else dot, inner)

    def _pipeline(self, rest: list[str], dot: Any, names: Mapping[str, Any]) -> Any:
        """Return the value of a pipeline, whose tokens are removed."""
        value, piped = None, list[Any]()
        while True:
            words = list[Any]()
            while rest and rest[0] not in ("|", ")"):
                words.append(self._term(rest, dot, names))
            first, *args = words
            value = first(*args, *piped) if callable(first) else first
            if not rest or rest.pop(0) == ")":
                return value
            piped = [value]

    def _term(self, rest: list[str], dot: Any, names: Mapping[str, Any]) -> Any:
        token = rest.pop(0)
        if token == "(":
            value = self._pipeline(rest, dot, names)
            return self._field(value, rest.pop(0)) if rest and rest[0].startswith(".") and len(rest[0]) > 1 else value
        if token[0] in '"`':
            return json.loads(token) if token[0] == '"' else token[1:-1]
        if token[0] in "$.":
            name, _dot, path = token.partition(".")
            return self._field(names[name] if name else dot, path)
        if token in ("include", "template", "tpl"):
            return self._tpl if token == "tpl" else self._include
        if token in _FUNCTIONS:
            return _FUNCTIONS[token]
        if re.fullmatch(r"-?[\d.]+", token):
            return float(token) if "." in token else int(token)
        raise LookupError(f"{token} is not known")

    @staticmethod
    def _field(value: Any, path: str) -> Any:
        for key in filter(None, path.split(".")):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _include(self, name: str, dot: Any = None) -> str:
        self._depth += 1
        if self._depth > _DEEPEST or name not in self._named:
            raise LookupError(f"the template {name} is not in the chart")
        text = self.rendered(self._named[name], dot, {"$": dot})
        self._depth -= 1
        return text

    def _tpl(self, text: Any, dot: Any) -> str:
        return self.rendered(self.parsed(_shown(text)), dot, {"$": dot})
