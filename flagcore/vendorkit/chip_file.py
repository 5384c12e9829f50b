"""Reads the chips of a plugin: one YAML file a chip, each figure with its source.

A figure is `{value: NUMBER, source: {kind: KIND, ...}}` in bytes, bytes per second or flops per second. Each kind of
source needs one key: measured `how`, datasheet `document`, published `where`, estimated `method`. Other keys (page,
software, date, repeats, confidence) are added to its text.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from flagcore.domain.chip import Chip, Link
from flagcore.vendorkit.fields import Part, read_parts

TOPOLOGIES = ("switch", "mesh", "pcie", "ring", "shared-memory")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")


@cache
def load_chips(package: str) -> tuple[Chip, ...]:
    """Return the chips of every `chips/*.yaml` in `package`, by file name. Raises SpecError for a bad file."""
    folder = files(package).joinpath("chips")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return tuple(read_chip(entry.read_text("utf-8"), f"{package}/chips/{entry.name}") for entry in found)


def read_chip(text: str, file: str) -> Chip:
    """Return the chip that `text` describes. Raises SpecError naming `file`, key, value, rule and fix."""
    chip = read_parts(text, file, "a chip file")
    found = Chip(
        name=chip.required("chip", str),
        vendor=chip.required("vendor", str),
        aliases=tuple(chip.listed("aliases", str)),
        memory_bytes=chip.fact("memory_bytes"),
        memory_bandwidth_bytes_per_second=chip.fact("memory_bandwidth_bytes_per_second"),
        dense_flops_per_second=chip.facts("dense_flops_per_second", PRECISIONS),
        devices_per_node=chip.optional("devices_per_node", int, 8),
        devices_per_card=chip.optional("devices_per_card", int, 1),
        link=_link(chip.part("link")),
        host_bytes_per_second=chip.fact("host_bytes_per_second"),
        nic_bytes_per_second=chip.fact("nic_bytes_per_second"),
        notes=chip.optional("notes", str, ""),
    )
    for key in ("devices_per_node", "devices_per_card"):
        if getattr(found, key) < 1:
            raise chip.wrong(key, "must be at least 1")
    chip.finish()
    return found


def _link(part: Part | None) -> Link | None:
    if part is None:
        return None
    rate = part.fact("bytes_per_second")
    if rate is None:
        raise part.wrong("bytes_per_second", "is missing", "leave out the link if its rate is unknown")
    link = Link(
        name=part.required("name", str),
        topology=part.choice("topology", TOPOLOGIES),
        bytes_per_second=rate,
        latency_seconds=float(part.optional("latency_seconds", (int, float), 10e-6)),
        domain_size=part.optional("domain_size", int, None),
        copy_engine=part.optional("copy_engine", bool, False),
        peer_access=part.optional("peer_access", bool, True),
        switch_reduces=part.optional("switch_reduces", bool, False),
    )
    part.finish()
    return link
