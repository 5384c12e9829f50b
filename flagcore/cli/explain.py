"""flag explain and compare: why candidates were eliminated, and how two of them differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flagcore.cli import options
from flagcore.i18n import _

if TYPE_CHECKING:
    from flagcore import api


@click.command("explain")
@click.argument("spec", metavar="SPEC|RUN", type=click.Path())
@click.argument("candidate", nargs=-1, metavar="[CANDIDATE]...")
@options.chip()
@options.output
@options.plugins
def explain_command(spec: str, candidate: tuple[str, ...], form: str, **arguments: Any) -> None:
    """Explain how the search space of SPEC was reduced: each rule, and how many combinations it eliminated.

    With RUN (the directory of a run), explain the space at the end of that run. With CANDIDATE, explain that one: why
    it was eliminated, its prediction, the nearest measured candidate, and what would have to change. CANDIDATE is the
    number of a trial, best, baseline, or knobs as in tables: "tp=2, mbs=16, dist-opt".
    """
    from dataclasses import asdict

    from flagcore import api
    from flagcore.errors import NothingFits
    from flagcore.report.explanation import eliminated, explanation_text

    if candidate:
        _print(api.explain_candidate(spec, " ".join(candidate), **arguments), form)
        return
    explanation = api.explain(spec, **arguments)
    if form == "table":
        options.show(explanation_text(explanation))
    elif form == "csv":
        removed = eliminated(explanation)
        messages = explanation.messages.items()
        rows = [{"rule": rule, "removed": removed.get(rule, 0), "message": message} for rule, message in messages]
        options.show_records(rows, form, options.columns("eliminated"))
    else:
        options.show_record(asdict(explanation), form)
    if explanation.nothing_fits:
        raise NothingFits(explanation.nothing_fits)


@click.command("compare")
@click.argument("names", nargs=-1, metavar="A B")
@click.option("--spec", type=click.Path(), metavar="SPEC", help="Compare two candidates of this spec.")
@options.chip()
@options.output
@options.plugins
def compare_command(names: tuple[str, ...], form: str, **arguments: Any) -> None:
    """Compare two candidates: knobs, predicted time and memory, measurements, and why they differ.

    A and B are RUN:CANDIDATE, or RUN for its best. B may be CANDIDATE alone, of the same run. With --spec, both are
    CANDIDATE alone. CANDIDATE is as for `flag explain`.
    """
    from flagcore import api

    if len(names) != 2:
        usage = "`flag compare RUN:best RUN:baseline`, `flag compare --spec SPEC 1 2`"
        raise click.UsageError(_("expected two candidates, got {count}: {usage}", count=len(names), usage=usage))
    _print(api.compare(*names, **arguments), form)


def _print(found: api.CandidateReport | api.Comparison, form: str) -> None:
    if form == "csv":
        raise click.UsageError(_("--format csv is not available for a report of candidates"))
    if form == "table":
        options.show(str(found))
    else:
        options.show_record(found.as_data(), form)
