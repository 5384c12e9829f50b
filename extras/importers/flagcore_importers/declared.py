"""Reads servers that a manifest or Helm values describe by keys. `declared.yaml` has the keys."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.launch import Start
from flagcore.spec.plain_data import SafeLoader
from flagcore_importers.containers import Images, container
from flagcore_importers.kubernetes import HALVES
from flagcore_importers.values import KEYS, count_devices, count_of, left_out, literal_variables, load_documents

_PLACEHOLDER = re.compile("<([^<>]+)>")
_UNUSABLE = re.compile(r"\{\{|^(?!(pvc\+)?hf://)\w+://")
"""A pattern of values that name no model here: templates, and addresses of other storage than a model hub."""
Table = Mapping[str, Any]


@cache
def read_table(name: str) -> Mapping[str, Table]:
    """Return a table of this package, which may contain merge keys."""
    found: Mapping[str, Table] = yaml.load(files(__package__).joinpath(f"{name}.yaml").read_text("utf-8"), SafeLoader)
    return found


def servers_of(document: Any, images: Images) -> Iterator[Start]:
    """Yield the servers in a YAML document that a table of `declared.yaml` describes.

    - `at`, `if`: the path of the section, and patterns of values in it.
    - `image`, `command`: of the container. Without a command, the image's entry point starts the server.
    - `model`, `flags`, `flags_of`, `args`: the arguments; `is_argparse`: flags that are false are left out. `script`: a
      script that starts the server instead.
    - `role`: `prefill` or `decode` if the server does only that.
    - `devices`, `hosts`, `instances`, `envs`: the paths of these values.
    - `job`: environment variables that the scheduler or the chart sets, each with the quantity that is its value:
      devices (of a host), hosts, total (of devices) or rank, or with the path of its value.
    """
    document = _with_sizes(document)
    for table in read_table("declared").values():
        for section in _sections(document, [key for key in table.get("at", "").split(".") if key]):
            found = _Section(document, section, table)
            if found.meets(table.get("if", {})):
                yield found.server(images)


def _with_sizes(document: Any) -> Any:
    """Return values of llm-d's chart with the sizes that it derives (templates/_helpers.tpl of llm-d-modelservice),
    and without the halves that it does not create; any other document itself."""
    if not isinstance(document, Mapping) or "modelArtifacts" not in document:
        return document
    document = dict(document)
    for half in HALVES:
        section = document.get(half)
        if not isinstance(section, Mapping) or section.get("create") is False or section.get("replicas") == 0:
            document.pop(half, None)
            continue
        sizes = _sizes(section.get("parallelism") or {}, several_hosts=bool(document.get("multinode")))
        document[half] = {**section, "parallelism": sizes}
    return document


def _sizes(given: Mapping[str, Any], *, several_hosts: bool) -> dict[str, Any]:
    data, local, workers = (count_of(given.get(name), 0) for name in ("data", "dataLocal", "workers"))
    sizes = {"data": data or local * (workers or 1), "dataLocal": local or data // (workers or 1)}
    sizes |= {"workers": workers or data // (local or data or 1)} if several_hosts else {}
    return {**given, **{name: size for name, size in sizes.items() if size > 1}}


def _sections(node: Any, keys: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings at a path. Items of lists, and YAML in a text, are part of the path."""
    if isinstance(node, str) and keys:
        node = next(load_documents(node), None)
    if isinstance(node, list):
        for each in node:
            yield from _sections(each, keys)
    elif isinstance(node, Mapping) and not keys:
        yield node
    elif isinstance(node, Mapping):
        for child in node.values() if keys[0] == "*" else [node.get(keys[0])]:
            yield from _sections(child, keys[1:])


class _Section:
    """A part of a document that a table describes, with the values of its keys."""

    def __init__(self, document: Any, section: Mapping[str, Any], table: Table) -> None:
        self._document, self._section, self._table = document, section, table

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

    def _of(self, key: str) -> Any:
        """Return the value at the path under `key` of the table, or None."""
        return self.value(self._table[key]) if key in self._table else None

    def meets(self, conditions: Mapping[str, str]) -> bool:
        """Return whether the values at the paths match the patterns. A missing value is an empty text."""
        values = ((pattern, self._at(path)) for path, pattern in conditions.items())
        return all(re.search(pattern, "" if value is None else str(value)) for pattern, value in values)

    def text(self, template: str) -> str:
        """Return a text with values in place of `<path>`. Unknown values become empty."""
        return _PLACEHOLDER.sub(lambda match: str(self.value(match[1]) or ""), template)

    def server(self, images: Images) -> Start:
        """Return what the section starts."""
        table = self._table
        start = Start(
            envs=literal_variables(self._envs()),
            devices=count_devices(self._of("devices")),
            hosts=count_of(self._of("hosts")),
            instances=count_of(self._of("instances")),
            role=table.get("role", ""),
            left_out=left_out(KEYS.values, self._others()),
        )
        start = replace(start, job=self._job(start.devices or 1, start.hosts))
        words = table.get("command") or ()
        found = self.value(words) or () if isinstance(words, str) else map(self.text, words)
        command, args = [word for word in found if word], self._args()
        for place, path in table.get("mounts", {}).items():
            command, args = ([word.replace(place, self.text(path)) for word in each] for each in (command, args))
        if script := self._script():
            command = ["bash", "-c", script]
        args = [*_renamed(args, table.get("renamed", {}))]
        return container(start, self.text(table.get("image", "")), command or None, args, images)

    def _job(self, devices: int, hosts: int) -> dict[str, str]:
        values, rows = (
            {"devices": devices, "hosts": hosts, "total": devices * hosts, "rank": 0},
            self._table.get("job", {}),
        )
        return {name: str(values[each] if each in values else self.value(each)) for name, each in rows.items()}

    def _args(self) -> list[str]:
        table = self._table
        args = [*_flags({flag: self.value(path) for flag, path in table.get("flags", {}).items()})]
        args += (_arguments if table.get("is_argparse") else _flags)(self._of("flags_of") or {})
        for each in table.get("args", ()):
            if isinstance(each, str):
                value = self.value(each) or []
                given = value.split() if isinstance(value, str) else map(str, value)
                args += [part for word in given for part in word.split(" ", word.startswith("--"))]
            elif self.meets(each["if"]):
                args += [self.text(word) for word in each["words"]]
        model = self.text(table.get("model", ""))
        return [model, *args] if model else args

    def _script(self) -> str:
        script = self._of("script") or ""
        if self._table.get("is_one_line"):
            return re.sub(r"\\?\n\s*(?!$)", " ", script)
        return "\n".join(script) if isinstance(script, list) else str(script)

    def _envs(self) -> Any:
        """Return the variables, without those that are arguments, and with those that have keys of their own."""
        table, envs = self._table, self._of("envs")
        read = {each.rpartition(".env.")[2] for each in table.get("args", ()) if isinstance(each, str)}
        if isinstance(envs, list):
            envs = [each for each in envs if isinstance(each, str) or each.get("name") not in read]
        named = {name: value for name, path in table.get("variables", {}).items() if (value := self.value(path))}
        return [*(envs or ()), *(f"{name}={value}" for name, value in named.items())] if named else envs

    def _others(self) -> dict[str, Any]:
        """Return the keys of the section that the table does not name, with their values."""
        table = str(self._table)
        known = {*re.findall(r"\w+", table), *(self._of("flags_of") or ())}
        parts = [part for key, part in self._section.items() if isinstance(part, Mapping) and f"{key}." in table]
        keys = {name: value for part in (self._section, *parts) for name, value in part.items()}
        return {key: value for key, value in keys.items() if key not in known}


def _flags(values: Mapping[str, Any]) -> Iterator[str]:
    for flag, value in values.items():
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None and not isinstance(value, (Mapping, list)):
            yield from (f"--{flag}", str(value)) if value != "" else (f"--{flag}",)


def _arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments of a program that has no flags for false, and whose flags may have several values."""
    for flag, value in values.items():
        words = [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
        if value is not None and value is not False:
            yield from (f"--{flag.lstrip('-').replace('_', '-')}", *words)


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
