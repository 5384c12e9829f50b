"""Reads the chips of a plugin: one YAML file per chip, in which each figure has its source.

A figure is `{value: NUMBER, source: {kind: KIND, ...}}` in bytes, bytes per second or flops per second. Each kind of
source needs one key: measured `how`, datasheet `document`, published `where`, estimated `method`. Other keys (page,
software, date, repeats, confidence) are added to its text.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.resources import files

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.vendorkit.fields import build, read_yaml

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
KEYS = {"chip": "name", **{each.name: each.name for each in fields(Chip) if each.name != "name"}}
"""The fields of a chip by the keys of the file."""


@cache
def load_chips(package: str) -> tuple[Chip, ...]:
    """Return the chips of every `chips/*.yaml` in `package`, by file name. Raises SpecError for a bad file."""
    folder = files(package).joinpath("chips")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return tuple(read_chip(entry.read_text("utf-8"), f"{package}/chips/{entry.name}") for entry in found)


def read_chip(text: str, file: str) -> Chip:
    """Return the chip that `text` describes. Raises SpecError naming `file`, key, value, rule and fix."""
    chip: Chip = build(Chip, read_yaml(text, file), file, names=KEYS)
    for name in chip.dense_flops_per_second:
        if name not in PRECISIONS:
            fix = f"the names are {', '.join(PRECISIONS)}"
            raise SpecError(file=file, key=f"dense_flops_per_second.{name}", problem="unknown precision", fix=fix)
    return chip
