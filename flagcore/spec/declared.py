"""Reads servers that a manifest or Helm values describe by keys. Tables of the keys are data of the engines."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

_PLACEHOLDER = re.compile("<([^<>]+)>")
_UNUSABLE = re.compile(r"\{\{|^(?!(pvc\+)?hf://)\w+://")
"""A pattern of values that name no model here: templates, and addresses of other storage than a model hub."""


def declared_servers(document: Any, tables: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the servers in a YAML document that one of `tables` describes (`engines/declared.yaml`).

    - `image`, `command`: of the container. The command is None if the image's entry point starts the server.
    - `args`: the arguments. `script`: the text of the script that starts the server; empty if there is none.
    - `role`: `prefill` or `decode` if the server does only that.
    - `devices`, `hosts`, `instances`, `envs`: values of keys, in the forms of the file. Missing if the table has none.
    - `left_out`: the keys of the section that the table does not name, with their values.
    - `job`: environment variables that the scheduler sets, each with the quantity that is its value: devices (of a
      host), hosts, total (of devices) or rank.
    """
    for table in tables.values():
        for section in _sections(document, [key for key in table.get("at", "").split(".") if key]):
            found = _Section(document, section)
            if found.meets(table.get("if", {})):
                yield found.server(table)


def _sections(node: Any, keys: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings at a path. Items of lists, and YAML in a text, are part of the path."""
    if isinstance(node, str) and keys:
        node = yaml.safe_load(node)
    if isinstance(node, list):
        for each in node:
            yield from _sections(each, keys)
    elif isinstance(node, Mapping) and not keys:
        yield node
    elif isinstance(node, Mapping):
        for child in node.values() if keys[0] == "*" else [node.get(keys[0])]:
            yield from _sections(child, keys[1:])


class _Section:
    """A part of a document, with the values of its keys."""

    def __init__(self, document: Any, section: Mapping[str, Any]) -> None:
        self._document, self._section = document, section

    def value(self, path: str) -> Any:
        """Return the first known value of the alternatives in `path`, or None."""
        for each in path.split("|"):
            value = each.strip("'") if each.startswith("'") else self._at(each)
            if value is not None and not (isinstance(value, str) and _UNUSABLE.search(value)):
                return re.sub("^hf://|^pvc.hf://[^/]+/", "", value) if isinstance(value, str) else value
        return None

    def _at(self, path: str) -> Any:
        node: Any = self._document if path.startswith("/") else self._section
        for key in path.lstrip("/").split("."):
            if isinstance(node, Mapping):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal():
                node = node[int(key)] if int(key) < len(node) else None
            elif isinstance(node, list):  # a list of variables
                rows = (each for each in node if isinstance(each, Mapping) and each.get("name") == key)
                node = next((each.get("value") for each in rows), None)
            else:
                return None
        return node

    def meets(self, conditions: Mapping[str, str]) -> bool:
        """Return whether the values at the paths match the patterns. A missing value is an empty text."""
        values = {path: self._at(path) for path in conditions}
        return all(
            re.search(pattern, "" if values[path] is None else str(values[path]))
            for path, pattern in conditions.items()
        )

    def text(self, template: str) -> str:
        """Return a text with values in place of `<path>`. Unknown values become empty."""
        return _PLACEHOLDER.sub(lambda match: str(self.value(match[1]) or ""), template)

    def server(self, table: Mapping[str, Any]) -> Mapping[str, Any]:
        args = [*self._flags({flag: self.value(path) for flag, path in table.get("flags", {}).items()})]
        args += self._flags(self.value(table["flags_of"]) or {}) if "flags_of" in table else []
        for each in table.get("args", ()):
            if isinstance(each, str):
                value = self.value(each) or []
                given = value.split() if isinstance(value, str) else map(str, value)
                args += [part for word in given for part in word.split(" ", word.startswith("--"))]
            elif self.meets(each["if"]):
                args += [self.text(word) for word in each["words"]]
        if model := self.text(table.get("model", "")):
            args = [model, *args]
        words = table.get("command") or ()
        script = self.value(table["script"]) if "script" in table else ""
        script = re.sub(r"\\?\n\s*(?!$)", " ", script) if table.get("is_one_line") and script else script
        found = self.value(words) or () if isinstance(words, str) else map(self.text, words)
        command = [word for word in found if word]
        known = {key: self.value(table[key]) for key in ("devices", "hosts", "instances", "envs") if key in table}
        for place, path in table.get("mounts", {}).items():
            command, args = ([word.replace(place, self.text(path)) for word in each] for each in (command, args))
        read = {each.rpartition(".env.")[2] for each in table.get("args", ()) if isinstance(each, str)}
        if isinstance(known.get("envs"), list):
            known["envs"] = [each for each in known["envs"] if isinstance(each, str) or each.get("name") not in read]
        named_keys = re.findall(r"\w+", str(table))
        parts = [part for key, part in self._section.items() if isinstance(part, Mapping) and f"{key}." in str(table)]
        keys = {name: value for part in (self._section, *parts) for name, value in part.items()}
        if named := {name: value for name, path in table.get("variables", {}).items() if (value := self.value(path))}:
            known["envs"] = [*(known.get("envs") or ()), *(f"{name}={value}" for name, value in named.items())]
        return {
            "image": self.text(table.get("image", "")),
            "command": command or None,
            "args": [*_renamed(args, table.get("renamed", {}))],
            "script": "\n".join(script) if isinstance(script, list) else str(script or ""),
            "role": table.get("role", ""),
            "job": table.get("job", {}),
            "left_out": {key: value for key, value in keys.items() if key not in named_keys},
            **known,
        }

    @staticmethod
    def _flags(values: Mapping[str, Any]) -> Iterator[str]:
        for flag, value in values.items():
            if isinstance(value, bool):
                yield f"--{flag}" if value else f"--no-{flag}"
            elif value is not None and not isinstance(value, (Mapping, list)):
                yield from (f"--{flag}", str(value)) if value != "" else (f"--{flag}",)


def _renamed(args: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield arguments with other flags. A flag whose new name is empty is left out, with its value."""
    is_left_out = False
    for arg in args:
        name, equals, value = arg.lstrip("-").partition("=")
        if arg.startswith("--"):
            new = names.get(name.replace("-", "_"), name)
            is_left_out = not new
            arg = f"--{new}{equals}{value}"
        if not is_left_out:
            yield arg
