"""What the plugin ships as data: quirks, how mature each part is, and what is still to be filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagcore.domain.maturity import Claim
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.vendorkit.fields import SOURCE_SAYS
from flagcore.vendorkit.quirks import Failure, Known, Must, Note, Refusal

MARK = "TODO"
"""Stands in a file of `flag plugins new` where the author has something to fill in."""


def quirks_can_be_read_and_each_has_a_source(plugin: Subject) -> Iterator[Problem]:
    known = plugin.quirks
    sections: dict[str, Sequence[Known | Refusal | Must | Failure | Note]] = {
        "support": known.support,
        "refused": known.refusals,
        "forced": known.forced,
        "failures": known.failures,
        "notes": known.notes,
    }
    for key, entries in sections.items():
        for place, each in enumerate(entries):
            if each.source.kind not in SOURCE_SAYS or not each.source.detail.strip():
                yield Problem(
                    message=f"quirks.yaml: {key}[{place}] has a source that says nothing", fix="say where it is from"
                )


def quirks_are_of_known_engines_and_chips(plugin: Subject) -> Iterator[Problem]:
    known, chips = plugin.quirks, {chip.name for chip in plugin.chips}
    sections: dict[str, Sequence[Known | Refusal | Must]] = {
        "support": known.support,
        "refused": known.refusals,
        "forced": known.forced,
    }
    for key, entries in sections.items():
        for place, each in enumerate(entries):
            yield from _strangers(plugin, f"{key}[{place}]", (each.engine,), each.chips, chips)
    for place, note in enumerate(known.notes):
        yield from _strangers(plugin, f"notes[{place}]", note.engines, note.chips, chips)


def what_quirks_refuse_is_told_by_the_hook(plugin: Subject) -> Iterator[Problem]:
    refusals = plugin.quirks.refusals
    if not refusals:
        raise Skip("quirks.yaml refuses nothing")
    if plugin.failed("flagcore_engine_support"):
        raise Skip("flagcore_engine_support gives no answer that can be used")
    for chip in plugin.own_chips():
        for each in refusals:
            concerned = not each.chips or chip.name in each.chips
            if concerned and each.refused not in plugin.loaded.engine_support(chip, each.engine).refused:
                yield Problem(
                    message=f"quirks.yaml refuses {each.refused.name}, flagcore_engine_support of {chip.name} does not",
                    fix="answer refused=refused(PACKAGE, chip, engine) there",
                )


def how_well_founded_it_is_is_told(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()
    if plugin.loaded.maturity(plugin.loaded.plugins[0]) is None:
        yield from plugin.told("flagcore_maturity")
        yield Problem(
            message="flagcore_maturity says nothing: `flag plugins list` cannot tell what its facts stand on",
            fix="write maturity.yaml, and answer maturity(PACKAGE) of flagcore.vendorkit.maturity",
        )


def maturity_names_known_chips(plugin: Subject) -> Iterator[Problem]:
    chips = {chip.name for chip in plugin.own_chips()}
    for claim in _claims(plugin):
        for name in sorted(set(claim.chips) - chips):
            yield Problem(message=f"maturity.yaml: {claim.what!r} names {name!r}", fix="name chips of chips/*.yaml")


def maturity_tells_where_the_facts_of_each_chip_are_from(plugin: Subject) -> Iterator[Problem]:
    said = {name for claim in _claims(plugin) if claim.what.startswith("facts of the chips") for name in claim.chips}
    for chip in plugin.own_chips():
        if chip.name not in said:
            yield Problem(
                message=f"maturity.yaml: {chip.name} is missing in the claim 'facts of the chips'",
                fix="list every chip there, under run_on_hardware, checked_on_transcripts or from_documents",
            )


def maturity_names_the_transcripts_that_are_there(plugin: Subject) -> Iterator[Problem]:
    named = [name for claim in plugin.maturity.checked_on_transcripts for name in claim.files]
    present = {each.name for each in plugin.transcripts}
    for name in sorted(present ^ set(named)):
        where = "is claimed in maturity.yaml, but is missing" if name in named else "is in no claim of maturity.yaml"
        yield Problem(
            message=f"tests/smi/{name} {where}", fix="let checked_on_transcripts name each file of tests/smi once"
        )


def what_was_measured_is_said_to_have_run_on_hardware(plugin: Subject) -> Iterator[Problem]:
    run = {name.casefold() for claim in plugin.maturity.run_on_hardware for name in claim.chips}
    there = sorted({path.parent.name for path in plugin.package_folder.glob("costs/*/provenance.yaml")})
    if not there:
        raise Skip("no measured kernels are shipped")
    for name in there:
        if name not in run:
            yield Problem(
                message=f"maturity.yaml: run_on_hardware does not name {name}, whose kernels costs/{name} has",
                fix="claim the kernel times there, with software and date",
            )


def costs_that_are_claimed_are_shipped_and_no_others(plugin: Subject) -> Iterator[Problem]:
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
            missing = f"claims {what} of {name}" if name in claimed else f"does not claim the {what} of {name}"
            yield Problem(message=f"maturity.yaml {missing}: costs/{name} and {file}", fix="let claim and files agree")


def nothing_is_left_to_fill_in(plugin: Subject) -> Iterator[Problem]:
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
    said = plugin.maturity
    return (*said.run_on_hardware, *said.checked_on_transcripts, *said.from_documents)


def _strangers(
    plugin: Subject, where: str, engines: tuple[str, ...], named: tuple[str, ...], chips: set[str]
) -> Iterator[Problem]:
    for word in (*sorted(set(engines) - set(plugin.engines)), *sorted(set(named) - chips)):
        yield Problem(
            message=f"quirks.yaml: {where} is of {word!r}",
            fix=f"engines are {', '.join(plugin.engines)}; chips are those of chips/*.yaml",
        )
