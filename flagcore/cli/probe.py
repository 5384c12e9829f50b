"""flag probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flagcore.cli import options
from flagcore.i18n import N_, _

if TYPE_CHECKING:
    from flagcore.domain.knob import Knobs


@click.command("probe")
@options.spec
@click.option(
    "--candidate",
    metavar="ID",
    help="Candidate to probe: number in the list of `flag estimate`, baseline, or knobs as name=value,...",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Probe the N fastest predicted candidates.",
    metavar="N",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="R",
    help="Global rank to probe (repeatable) [default: the most informative ranks].",
)
@options.chip(N_("Plan for this chip, which must be on this machine."))
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0, max=86400.0),
    metavar="S",
    help="Time limit per candidate [default: control.max_time_per_task].",
)
@click.option("--folder", type=click.Path(), metavar="DIR", help="Save jobs and logs to DIR [default: not saved].")
@click.option("-q", "--quiet", is_flag=True, help="Hide progress.")
@options.output
@options.plugins
def probe_command(
    spec: str,
    candidate: str | None,
    top: int,
    ranks: tuple[int, ...],
    chip: str | None,
    seconds: float | None,
    folder: str | None,
    quiet: bool,
    form: str,
    without: tuple[str, ...],
) -> None:
    """Measure single ranks of candidates of SPEC on one device, for any number of devices in SPEC.

    One process runs the layers, micro-batches and optimizer of a rank of the full job. There are no other ranks, so
    communication is predicted, not measured.
    """
    from flagcore import api

    if candidate is not None and top != 1:
        raise click.UsageError(_("--candidate and --top are mutually exclusive"))
    probes = api.probe(
        spec,
        candidate=candidate,
        top=top,
        ranks=ranks,
        chip=chip,
        seconds=seconds,
        folder=folder,
        without=without,
        on_rank=lambda line: None if quiet else options.say(f"flag: {line}"),
    )
    if form not in ("table", "csv"):
        options.show_records([each.as_data() for each in probes], form, {})
        return
    rows = [{"number": number, **rank} for number, each in enumerate(probes, start=1) for rank in each.ranks]
    columns = options.columns("probed")
    if len(probes) == 1:
        del columns["#"]
    options.show_records(rows, form, columns)
    if form == "table":
        for number, each in enumerate(probes, start=1):
            options.say("\n" + "\n".join(_summary(number if len(probes) > 1 else None, each.as_data(), each.knobs)))


def _summary(number: int | None, probed: dict[str, Any], knobs: Knobs) -> list[str]:
    """Return why ranks failed, whether times are extrapolated, and the predictions without and with the probe."""
    from flagcore.report.text import candidate_line

    lines = [
        _("rank {rank}: {reason}", rank=rank["rank"], reason=rank["reason"])
        for rank in probed["ranks"]
        if rank["reason"]
    ]
    measurements = [rank["measured"] for rank in probed["ranks"] if "measured" in rank]
    for each in [each for each in measurements if each["microbatches_run"] < each["microbatches"]][:1]:
        lines.append(_("Times are extrapolated to {count} micro-batches.", count=each["microbatches"]))
    name = f"{number} " if number is not None else ""
    lines.append(candidate_line(name + _("predicted"), {**probed, **probed["predicted"]}, knobs))
    lines.append(candidate_line(name + _("with probe"), {**probed, **probed["combined"]}, knobs))
    return lines
