"""Data files: quirks, maturity, and placeholders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flagcore.domain.maturity import Claim
from flagcore.plugins import kind_of
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.vendorkit.fields import SOURCE_KEYS
from flagcore.vendorkit.quirks import Quirk

MARK = "TODO"
"""Marks a placeholder in files of `flag plugins new`."""


def quirks_have_sources(plugin: Subject) -> Iterator[Problem]:
    for where, quirk in _quirks(plugin):
        if quirk.source.kind not in SOURCE_KEYS or not quirk.source.detail.strip():
            yield Problem(f"quirks.yaml: the source of {where} is empty", "say where it is from")


def quirks_name_known_engines_and_chips(plugin: Subject) -> Iterator[Problem]:
    for where, quirk in _quirks(plugin):
        for word in plugin.unknown(quirk.scope):
            yield Problem(f"quirks.yaml: {where} is for {word!r}, which is unknown", plugin.known_names)


def quirks_are_used(plugin: Subject) -> Iterator[Problem]:
    if not plugin.quirks.refused:
        raise Skip("quirks.yaml refuses nothing")
    if plugin.failed("flagcore_engine_support"):
        raise Skip("flagcore_engine_support gives no usable answer")
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            refused = plugin.loaded.engine_support(chip, engine).refused
            for quirk in plugin.quirks.refused:
                if quirk.scope.includes(chip, engine, None, kind_of(engine)) and quirk.value not in refused:
                    yield Problem(
                        f"flagcore_engine_support: {chip.name} lacks {quirk.value.name} of quirks.yaml",
                        "return the entries of quirks.yaml there, as VendorPlugin does",
                    )


def maturity_is_given(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()
    if plugin.loaded.maturity(plugin.loaded.plugins[0]) is None:
        yield from plugin.problems_of("flagcore_maturity")
        yield Problem(
            "flagcore_maturity returns None, so `flag plugins list` cannot show how well founded the facts are",
            "write maturity.yaml, and return its content as VendorPlugin does",
        )


def maturity_names_known_chips(plugin: Subject) -> Iterator[Problem]:
    chips = {chip.name for chip in plugin.own_chips()}
    for claim in _claims(plugin):
        for name in sorted(set(claim.chips) - chips):
            yield Problem(
                f"maturity.yaml: {claim.what!r} names the unknown chip {name!r}", "name chips of chips/*.yaml"
            )


def maturity_covers_all_chips(plugin: Subject) -> Iterator[Problem]:
    maturity = {
        name for claim in _claims(plugin) if claim.what.startswith("facts of the chips") for name in claim.chips
    }
    for chip in plugin.own_chips():
        if chip.name not in maturity:
            yield Problem(
                f"maturity.yaml: {chip.name} is missing in 'facts of the chips'",
                "list every chip there, under run_on_hardware, checked_on_transcripts or from_documents",
            )


def maturity_names_existing_transcripts(plugin: Subject) -> Iterator[Problem]:
    named = [name for claim in plugin.maturity.checked_on_transcripts for name in claim.files]
    present = {each.name for each in plugin.transcripts}
    for name in sorted(present ^ set(named)):
        where = "is missing, but maturity.yaml names it" if name in named else "is not named in maturity.yaml"
        yield Problem(f"tests/smi/{name} {where}", "name each file of tests/smi once under checked_on_transcripts")


def measured_kernels_are_claimed(plugin: Subject) -> Iterator[Problem]:
    run = {name.casefold() for claim in plugin.maturity.run_on_hardware for name in claim.chips}
    there = sorted({path.parent.name for path in plugin.package_folder.glob("costs/*/provenance.yaml")})
    if not there:
        raise Skip("there are no measured kernels")
    for name in there:
        if name not in run:
            yield Problem(
                f"maturity.yaml: run_on_hardware lacks {name}, although costs/{name} has measured kernels",
                "add the kernel times there, with software and date",
            )


def claimed_costs_are_shipped(plugin: Subject) -> Iterator[Problem]:
    claims, folder = _claims(plugin), plugin.package_folder

    def named(*words: str) -> set[str]:
        return {
            name.casefold() for claim in claims if any(word in claim.what for word in words) for name in claim.chips
        }

    curves = {path.parent.name for path in folder.glob("costs/*/collectives.yaml") if "same_as" not in path.read_text()}
    kernels = {path.parent.name for name in ("curve", "kernels") for path in folder.glob(f"costs/*/{name}.*")}
    for what, file, claimed, shipped in (
        ("collectives", "collectives.yaml", named("collectives", "all-reduces"), curves),
        ("kernel times", "curve.yaml or kernels.jsonl", named("kernel times"), kernels),
    ):
        for name in sorted(claimed ^ shipped):
            missing = f"names {what} of {name}" if name in claimed else f"does not name the {what} of {name}"
            yield Problem(
                f"maturity.yaml {missing}: costs/{name} and {file} disagree", "correct maturity.yaml or the files"
            )


def no_placeholders_are_left(plugin: Subject) -> Iterator[Problem]:
    places = list(_to_fill_in(plugin))
    if places:
        raise Skip(f"to fill in: {', '.join(places)}")
    yield from ()


def _to_fill_in(plugin: Subject) -> Iterator[str]:
    folder = plugin.packaged.folder or plugin.package_folder
    suffixes = {".yaml", ".py", ".md", ".toml", ".jsonl"}
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
                if MARK in line:
                    yield f"{path.relative_to(folder)}:{number}"


def _claims(plugin: Subject) -> tuple[Claim, ...]:
    maturity = plugin.maturity
    return (*maturity.run_on_hardware, *maturity.checked_on_transcripts, *maturity.from_documents)


def _quirks(plugin: Subject) -> Iterator[tuple[str, Quirk[Any]]]:
    quirks = plugin.quirks
    for section in fields(quirks):
        yield from ((f"{section.name}[{place}]", each) for place, each in enumerate(getattr(quirks, section.name)))
