"""Chips: their names, and each figure with a source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

from flagcore.testing.facts import facts_of
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.vendorkit.fields import SOURCE_KEYS

KINDS = {*SOURCE_KEYS, "user"}
DATE = re.compile(r"\d{4}(-\d{2}){0,2}")


def chips_and_devices_are_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.loaded.chips()
    plugin.loaded.devices()
    yield from (
        problem
        for problem in plugin.problems_of("flagcore_chips", "flagcore_devices")
        if "answers to" not in problem.message
    )


def figures_have_sources(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for key, fact in facts_of(chip):
            if fact.source.kind not in KINDS or not fact.source.detail.strip():
                yield Problem(
                    f"{chip.name}: {key} has the source {fact.source.kind!r} {fact.source.detail!r}",
                    f"give it a kind of {', '.join(SOURCE_KEYS)}, and the key that the kind needs",
                )


def source_dates_are_iso(plugin: Subject) -> Iterator[Problem]:
    plugin.package_folder  # noqa: B018 (raises Skip)
    for name, content in plugin.yaml_files("**/*.yaml"):
        for key, value in _dates(content):
            if not (isinstance(value, date | datetime) or DATE.fullmatch(str(value))):
                yield Problem(f"{name}: {key} = {value!r} is not a date", "write it as 2026-11-02 or 2026-11")


def measured_figures_have_dates(plugin: Subject) -> Iterator[Problem]:
    plugin.package_folder  # noqa: B018 (raises Skip)
    for name, content in plugin.yaml_files("**/*.yaml"):
        for key, source in _measured(content):
            if not source.get("date"):
                yield Problem(
                    f"{name}: {key} is measured, but has no date",
                    "add date: 2026-11-02, and preferably software and repeats; measurements of others are published",
                )


def chip_names_are_unique(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()
    for problem in plugin.problems_of("flagcore_chips"):
        if "answers to" in problem.message:
            yield Problem(problem.message, "give each name or alias to one chip")


def chip_names_differ_from_other_plugins(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for name in (chip.name, *chip.aliases):
            if owner := plugin.others.owner(name):
                yield Problem(
                    f"{chip.name}: {name!r} is also a name of a chip of the plugin {owner}",
                    "list only names that this vendor's tools print",
                )


def chips_are_found_by_name(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for name in (chip.name, *chip.aliases):
            found = plugin.loaded.find_chip(name.upper())
            if found is None or found.name != chip.name:
                yield Problem(f"{chip.name} is not found as {name.upper()!r}", "give this name to one chip only")


def chip_names_have_no_extra_spaces(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for name in (chip.name, chip.vendor, *chip.aliases):
            if not name or name != " ".join(name.split()) or not name.isprintable():
                yield Problem(f"{chip.name}: the name {name!r} has extra spaces", "separate words by single spaces")


def aliases_are_listed_once(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for name, times in Counter(name.casefold() for name in chip.aliases).items():
            if times > 1:
                yield Problem(f"{chip.name}: aliases has {name!r} {times} times, ignoring case", "keep one of them")


def chips_have_one_lowercase_vendor(plugin: Subject) -> Iterator[Problem]:
    vendors = sorted({chip.vendor for chip in plugin.own_chips()})
    if len(vendors) > 1 or vendors[0] != vendors[0].casefold():
        yield Problem(f"vendor is {', '.join(vendors)}", "write the same lower-case word in each chips/*.yaml")


def chip_files_match_chip_names(plugin: Subject) -> Iterator[Problem]:
    files = {name: content for name, content in plugin.yaml_files("chips/*.yaml") if isinstance(content, dict)}
    if not files:
        raise Skip("the plugin has no chips/*.yaml")
    names = {chip.name for chip in plugin.chips}
    for name, content in files.items():
        chip = str(content.get("chip"))
        stem = name.rpartition("/")[2].removesuffix(".yaml")
        if stem != chip.casefold().replace(" ", "-"):
            yield Problem(f"{name}: chip is {chip}", f"name the file {chip.casefold().replace(' ', '-')}.yaml")
        elif names and chip not in names:
            yield Problem(
                f"{name}: flagcore_chips does not return {chip}",
                "return load_chips(package) there, as VendorPlugin does",
            )


def _measured(content: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        if isinstance(value, dict) and value.get("kind") == "measured":
            yield f"{path}{key}", value
        else:
            yield from _measured(value, f"{path}{key}.")


def _dates(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        if key == "date":
            yield f"{path}date", value
        else:
            yield from _dates(value, f"{path}{key}.")
