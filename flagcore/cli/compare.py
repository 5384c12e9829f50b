"""flag explain and compare: why a candidate lost, and what tells two of them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flagcore.cli import options

if TYPE_CHECKING:
    from flagcore import api


@click.command("explain")
@click.argument("spec", metavar="SPEC|RUN", type=click.Path())
@click.argument("candidate", nargs=-1, metavar="[CANDIDATE]...")
@options.chip()
@options.output
@options.plugins
def explain_command(
    spec: str, candidate: tuple[str, ...], chip: str | None, form: str, without: tuple[str, ...]
) -> None:
    """Tell where every combination of SPEC went: which rule removed how many, and what each rule says.

    With the folder of a run, tell it as it was when the run ended. With a CANDIDATE, tell all of that one: what removed
    it, what was predicted, what the nearest measured one did, and what would have to change. It is a trial's number,
    best, baseline, or knobs as tables show them: "tp=2, mbs=16, dist-opt".
    """
    from dataclasses import asdict

    from flagcore import api
    from flagcore.errors import NothingFits
    from flagcore.report.explanation import knobs_text, notes_text
    from flagcore.report.formats import render
    from flagcore.report.text import funnel, repeats_text

    if candidate:
        _tell(api.explain_candidate(spec, " ".join(candidate), chip=chip, without=without), form)
        return
    found = api.explain(spec, chip=chip, without=without)
    took = {**found.counts.illegal, **found.counts.pruned}
    if form == "table":
        says = [{"rule": name, "says": found.says.get(name, "")} for name in took]
        options.show("\n".join([funnel(found.counts, found.fidelity), *repeats_text(found.failed_repeats)]))
        options.show("\n" + render(says, "table", {"rule": "rule", "says": "says"}))
        for text in (knobs_text(found.knobs), notes_text(found.notes)):
            if text:
                options.show(f"\n{text}")
        if found.ended_because:
            options.show(f"\nThe run ended because {found.ended_because}.")
    elif form == "json":
        click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
    else:
        rows = [{"rule": rule, "took": took.get(rule, 0), "says": says} for rule, says in found.says.items()]
        options.show(render(rows if form == "csv" else [asdict(found)], form, EXPLAIN_COLUMNS), form)
    if found.nothing_fits:
        raise NothingFits(found.nothing_fits)


@click.command("compare")
@click.argument("two", nargs=-1, metavar="A B")
@click.option("--spec", type=click.Path(), metavar="SPEC", help="A and B are candidates of this spec.")
@options.chip()
@options.output
@options.plugins
def compare_command(
    two: tuple[str, ...], spec: str | None, chip: str | None, form: str, without: tuple[str, ...]
) -> None:
    """Compare two candidates part by part: knobs, predicted time and memory, what was measured, and why they differ.

    A and B are RUN:CANDIDATE, or RUN for its best; B may be CANDIDATE alone, of the same run, and with --spec both
    are. A CANDIDATE is told as for `flag explain`.
    """
    from flagcore import api

    if len(two) != 2:
        raise click.UsageError(f"compare takes two candidates, not {len(two)}: {_meant(two)}")
    a, b = two
    _tell(api.compare(a, b, spec=spec, chip=chip, without=without), form)


def _meant(words: tuple[str, ...]) -> str:
    """Return what to type instead of words that are not two candidates."""
    if len(words) == 3 and Path(words[0]).exists():
        place, a, b = words
        return f"`flag compare {place}:{a} {place}:{b}`" if Path(place).is_dir() else _of_spec(place, a, b)
    return f"`flag compare RUN:best RUN:baseline`, or {_of_spec('SPEC', '1', '2')}"


def _of_spec(spec: str, a: str, b: str) -> str:
    return f"`flag compare --spec {spec} {a} {b}`"


def _tell(found: api.CandidateReport | api.Comparison, form: str) -> None:
    """Print what is known of candidates: text for people, or one record."""
    from flagcore.report.formats import render

    if form == "csv":
        raise click.UsageError("candidates told in full have no columns: use another --format than csv")
    data = found.as_data()
    if form == "table":
        options.show(str(found))
    else:
        click.echo(json.dumps(data, indent=2, ensure_ascii=False) if form == "json" else render([data], form, {}))


EXPLAIN_COLUMNS = {"rule": "rule", "took": "took", "says": "says"}
