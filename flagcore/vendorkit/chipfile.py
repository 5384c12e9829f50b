"""Reads the chips of a plugin: one YAML file a chip, each figure with its source. For plugins; the core never calls it.

A figure is `{value: NUMBER, source: {kind: KIND, ...}}` in bytes, bytes per second or flops per second. Each kind of
source must say one thing: measured `how`, datasheet `document`, published `where`, estimated `method`. What else it
says (page, software, date, repeats, confidence) is kept in its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.chip import Chip, Fact, Link, Source
from flagcore.errors import SpecError

SOURCE_SAYS = {"measured": "how", "datasheet": "document", "published": "where", "estimated": "method"}
TOPOLOGIES = ("switch", "mesh", "pcie", "ring", "shared-memory")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")


def load_chips(package: str) -> tuple[Chip, ...]:
    """Return the chips of every `chips/*.yaml` in `package`, by file name. Raises SpecError for a bad file."""
    folder = files(package).joinpath("chips")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return tuple(read_chip(entry.read_text("utf-8"), f"{package}/chips/{entry.name}") for entry in found)


def read_chip(text: str, file: str) -> Chip:
    """Return the chip that `text` describes. Raises SpecError naming `file`, key, value, rule and fix."""
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
        raise SpecError(file=file, key="the file", problem=problem) from error
    chip = _Part(file, "", content)
    made = Chip(
        name=chip.required("chip", str),
        vendor=chip.required("vendor", str),
        aliases=tuple(chip.listed("aliases", str)),
        memory_bytes=chip.fact("memory_bytes"),
        memory_bandwidth_bytes_per_second=chip.fact("memory_bandwidth_bytes_per_second"),
        dense_flops_per_second=chip.facts("dense_flops_per_second", PRECISIONS),
        devices_per_node=chip.optional("devices_per_node", int, 8),
        link=_link(chip.part("link")),
        nic_bytes_per_second=chip.fact("nic_bytes_per_second"),
        notes=chip.optional("notes", str, ""),
    )
    if made.devices_per_node < 1:
        raise chip.wrong("devices_per_node", "must be at least 1")
    chip.finish()
    return made


def _link(part: _Part | None) -> Link | None:
    if part is None:
        return None
    rate, topology = part.fact("bytes_per_second"), part.required("topology", str)
    if rate is None:
        raise part.wrong("bytes_per_second", "is missing", "leave the whole link out if nobody knows its rate")
    if topology not in TOPOLOGIES:
        raise part.wrong("topology", "is no topology", f"use one of {', '.join(TOPOLOGIES)}")
    link = Link(
        name=part.required("name", str),
        topology=topology,
        bytes_per_second=rate,
        latency_seconds=float(part.optional("latency_seconds", (int, float), 10e-6)),
        island_size=part.optional("island_size", int, None),
    )
    part.finish()
    return link


@dataclass(slots=True)
class _Part:
    """One mapping of the file, with the way to it, and the keys that were read from it."""

    file: str
    path: str
    content: Any

    def __post_init__(self) -> None:
        if not isinstance(self.content, Mapping):
            key = self.path or "the file"
            raise SpecError(file=self.file, key=key, value=self.content, problem="must be keys with values")
        self.content = dict(self.content)

    def wrong(self, key: object, problem: str, fix: str = "", value: object = None) -> SpecError:
        return SpecError(file=self.file, key=f"{self.path}{key}", value=value, problem=problem, fix=fix)

    def optional(self, key: str, kind: Any, default: Any) -> Any:
        value = self.content.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            words = {str: "text", int: "a whole number", float: "a number"}
            problem = f"must be {words.get(kinds[-1], 'keys with values')}"
            raise self.wrong(key, problem, _number_hint(value, kinds), value)
        return value

    def required(self, key: str, kind: Any) -> Any:
        value = self.optional(key, kind, None)
        if value is None:
            raise self.wrong(key, "is missing")
        return value

    def listed(self, key: str, kind: type) -> list[Any]:
        values: list[Any] = self.optional(key, list, [])
        for value in values:
            if not isinstance(value, kind):
                raise self.wrong(key, f"must be a list of {kind.__name__}", value=value)
        return values

    def part(self, key: str) -> _Part | None:
        value = self.content.pop(key, None)
        return None if value is None else _Part(self.file, f"{self.path}{key}.", value)

    def fact(self, key: str) -> Fact | None:
        part = self.part(key)
        if part is None:
            return None
        value = part.required("value", (int, float))
        if not 0 < value < float("inf"):
            raise part.wrong("value", "must be above 0", "leave out what nobody published or measured", value)
        fact = Fact(value=float(value), source=_source(part.part("source"), part))
        part.finish()
        return fact

    def facts(self, key: str, known: tuple[str, ...]) -> dict[str, Fact]:
        part = self.part(key)
        if part is None:
            return {}
        found = {name: fact for name in known if (fact := part.fact(name))}
        part.finish(f"the precisions are {', '.join(known)}")
        return found

    def finish(self, fix: str = "") -> None:
        """Refuse the keys that nobody read."""
        for key in self.content:
            raise self.wrong(key, "is no key of a chip file", fix or "see docs/write-a-plugin.md for the keys")


def _source(part: _Part | None, fact: _Part) -> Source:
    if part is None:
        raise fact.wrong("source", "is missing", "say where the figure is from")
    kind = part.required("kind", str)
    if kind not in SOURCE_SAYS:
        raise part.wrong("kind", "is no kind of source", f"use one of {', '.join(SOURCE_SAYS)}", kind)
    told = part.required(SOURCE_SAYS[kind], str)
    more = [f"{key} {value}" for key, value in part.content.items()]
    return Source(kind=kind, detail=", ".join([told, *more]))


def _number_hint(value: object, kinds: tuple[type, ...]) -> str:
    if float not in kinds or not isinstance(value, str):
        return ""
    try:
        return f"write {float(value):e} (YAML reads {value} as text)"
    except ValueError:
        return "write digits, e.g. 3.0e+14"
