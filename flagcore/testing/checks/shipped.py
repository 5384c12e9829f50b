"""Data files: quirks, maturity, and placeholders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from flagcore.domain.maturity import Claim
from flagcore.plugins import kind_of
from flagcore.testing.kit import Problem, Problems, Skip, Subject, check
from flagcore.vendorkit.knobs import all_knobs
from flagcore.vendorkit.quirks import read_quirks
from flagcore.vendorkit.scope import Scope, applicable
from flagcore.vendorkit.variables import read_variables

MARK = "TODO"
"""Mark of a placeholder in files of `flag plugins new`."""


def _entries(plugin: Subject) -> Iterator[tuple[Subject, str, Scope]]:
    """Yield the location and the content of each entry that may be restricted to chips or engines."""
    quirks = read_quirks(plugin.package)
    for section in fields(quirks):
        for place, each in enumerate(getattr(quirks, section.name)):
            yield plugin, f"quirks.yaml: {section.name}[{place}]", each
    yield from ((plugin, f"environment.yaml: {each.name}", each) for each in read_variables(plugin.package))
    yield from ((plugin, f"knobs.yaml: {each.knob.name}", each.scope) for each in all_knobs(plugin.package))


@check(each=_entries)
def entries_name_known_engines_and_chips(plugin: Subject, where: str, scope: Scope) -> Problems:
    fix = f"engines are {', '.join(plugin.engines)}; chips are those of chips/*.yaml"
    unknown = {*scope.engines} - {*plugin.engines} | {*scope.chips} - {chip.name for chip in plugin.chips}
    for word in unknown:
        yield Problem(f"{where} is for the unknown {word!r}", fix)


@check("return the entries of quirks.yaml there, as VendorPlugin does")
def quirks_are_used(plugin: Subject) -> Problems:
    if not plugin.quirks.refused:
        raise Skip("quirks.yaml refuses nothing")
    if plugin.failed("flagcore_engine_support"):
        raise Skip("flagcore_engine_support has no valid answer")
    for chip, engine in plugin.pairs():
        refused_values = plugin.loaded.engine_support(chip, engine).refused
        for quirk in applicable(plugin.quirks.refused, chip, engine, None, kind_of(engine)):
            if quirk not in refused_values:
                yield f"flagcore_engine_support: {chip.name} lacks {quirk.name} of quirks.yaml"


@check("write maturity.yaml, and return its content as VendorPlugin does")
def maturity_is_given(plugin: Subject) -> Problems:
    plugin.own_chips()
    if plugin.loaded.maturity(plugin.loaded.plugins[0]) is None:
        yield from plugin.problems_of("flagcore_maturity")
        yield "flagcore_maturity returns None, so `flag plugins list` cannot show the maturity of the data"


@check("name chips of chips/*.yaml")
def maturity_names_known_chips(plugin: Subject) -> Problems:
    chips = {chip.name for chip in plugin.own_chips()}
    for claim in _claims(plugin):
        for name in sorted(set(claim.chips) - chips):
            yield f"maturity.yaml: {claim.what!r} names the unknown chip {name!r}"


@check("list every chip there, under run_on_hardware, checked_on_transcripts or from_documents")
def maturity_covers_all_chips(plugin: Subject) -> Problems:
    covered_chips = _chips_of(plugin, "facts of the chips")
    for chip in plugin.own_chips():
        if chip.name.casefold() not in covered_chips:
            yield f"maturity.yaml: {chip.name} is missing in 'facts of the chips'"


@check("name each file of tests/smi once under checked_on_transcripts")
def maturity_names_existing_transcripts(plugin: Subject) -> Problems:
    named_files = {name for claim in plugin.maturity.checked_on_transcripts for name in claim.files}
    for name in sorted({each.name for each in plugin.transcripts} ^ named_files):
        problem = "is missing, but maturity.yaml names it" if name in named_files else "is not named in maturity.yaml"
        yield f"tests/smi/{name} {problem}"


@check("add the kernel times there, with software and date")
def measured_kernels_are_claimed(plugin: Subject) -> Problems:
    run = {name.casefold() for claim in plugin.maturity.run_on_hardware for name in claim.chips}
    measured_folders = _folders_with(plugin, "provenance.yaml", without="\nsource:")
    if not measured_folders:
        raise Skip("there are no measured kernels")
    for name in sorted(measured_folders - run):
        yield f"maturity.yaml: run_on_hardware lacks {name}, although costs/{name} has measured kernels"


@check("correct maturity.yaml or the files")
def claimed_costs_are_shipped(plugin: Subject) -> Problems:
    curves = _folders_with(plugin, "collectives.yaml", without="same_as")
    kernels = _folders_with(plugin, "curve.yaml") | _folders_with(plugin, "kernels.jsonl")
    for what, file, claimed, shipped in (
        ("collectives", "collectives.yaml", _chips_of(plugin, "collectives", "all-reduces"), curves),
        ("kernel times", "curve.yaml or kernels.jsonl", _chips_of(plugin, "kernel times"), kernels),
    ):
        for name in sorted(claimed ^ shipped):
            problem = f"names {what} of {name}" if name in claimed else f"does not name the {what} of {name}"
            yield f"maturity.yaml {problem}: costs/{name} and {file} disagree"


@check()
def no_placeholders_are_left(plugin: Subject) -> Problems:
    if places := list(_placeholders(plugin)):
        raise Skip(f"to fill in: {', '.join(places)}")
    yield from ()


def _placeholders(plugin: Subject) -> Iterator[str]:
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


def _chips_of(plugin: Subject, *words: str) -> set[str]:
    """Return the chips of the claims with one of these words, in lower case like the folders of costs."""
    claims = (claim for claim in _claims(plugin) if any(word in claim.what for word in words))
    return {name.casefold() for claim in claims for name in claim.chips}


def _folders_with(plugin: Subject, file: str, without: str = "\0") -> set[str]:
    """Return the folders of costs with a file that does not contain the text `without`."""
    files = plugin.package_folder.glob(f"costs/*/{file}")
    return {path.parent.name for path in files if without not in path.read_text("utf-8")}
