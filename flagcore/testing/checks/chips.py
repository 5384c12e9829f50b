"""Chips: names, and sources of figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

from flagcore.domain.chip import Chip, normalize_name
from flagcore.testing.kit import Problem, Problems, Skip, Subject, check, chips
from flagcore.vendorkit.fields import SOURCE_KEYS

KINDS = {*SOURCE_KEYS, "user"}
DATE = re.compile(r"\d{4}(-\d{2}){0,2}")


@check()
def chips_and_devices_are_valid(plugin: Subject) -> Problems:
    plugin.loaded.chips()
    plugin.loaded.devices()
    for problem in plugin.problems_of("flagcore_chips", "flagcore_devices"):
        if "is already a name of" not in problem.message:
            yield problem


@check("write it as 2026-11-02 or 2026-11")
def source_dates_are_iso(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, entry in _mappings(content):
            value = entry.get("date", "2026")
            if not (isinstance(value, date | datetime) or DATE.fullmatch(str(value))):
                yield f"{name}: {path}date = {value!r} is not a date"


@check("add date: 2026-11-02, and preferably software and repeats; measurements of others are published")
def measured_figures_have_dates(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, entry in _mappings(content):
            if entry.get("kind") == "measured" and not entry.get("date"):
                yield f"{name}: {path.rstrip('.')} is measured, but has no date"


@check("give each name or alias to one chip")
def chip_names_are_unique(plugin: Subject) -> Problems:
    plugin.own_chips()
    for problem in plugin.problems_of("flagcore_chips"):
        if "is already a name of" in problem.message:
            yield problem.message


@check("list only names that this vendor's tools print")
def chip_names_differ_from_other_plugins(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        vendor = normalize_name(chip.vendor)
        for name in (chip.name, *chip.aliases):
            spellings = dict.fromkeys((name, normalize_name(name).removeprefix(vendor)))
            if owner := next(filter(None, map(plugin.others.owner, spellings)), None):
                yield f"{chip.name}: {name!r} is also a name of a chip of the plugin {owner}"


@check("separate words by single spaces, and keep one of names that differ in case only", each=chips)
def chip_names_are_clean(chip: Chip) -> Problems:
    for name in (chip.name, chip.vendor, *chip.aliases):
        if not name or name != " ".join(name.split()) or not name.isprintable():
            yield f"{chip.name}: the name {name!r} has extra spaces"
    for name, times in Counter(name.casefold() for name in chip.aliases).items():
        if times > 1:
            yield f"{chip.name}: aliases has {name!r} {times} times, ignoring case"


@check("write the same lower-case word in each chips/*.yaml")
def chips_have_one_lowercase_vendor(plugin: Subject) -> Problems:
    vendors = sorted({chip.vendor for chip in plugin.own_chips()})
    if len(vendors) > 1 or vendors[0] != vendors[0].casefold():
        yield f"vendor is {', '.join(vendors)}"


@check()
def chip_files_match_chip_names(plugin: Subject) -> Problems:
    files = {name: content for name, content in plugin.yaml_files("chips/*.yaml") if isinstance(content, dict)}
    if not files:
        raise Skip("the plugin has no chips/*.yaml")
    names = {chip.name for chip in plugin.chips}
    for name, content in files.items():
        chip = str(content.get("chip"))
        file = f"{chip.casefold().replace(' ', '-')}.yaml"
        if name != f"chips/{file}":
            yield Problem(f"{name}: chip is {chip}", f"name the file {file}")
        elif names and chip not in names:
            fix = "return load_chips(package) there, as VendorPlugin does"
            yield Problem(f"{name}: flagcore_chips does not return {chip}", fix)


def _mappings(content: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping of a file with its path, which ends in a dot; empty for the file."""
    if isinstance(content, dict):
        yield path, content
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield from _mappings(value, f"{path}{key}.")
