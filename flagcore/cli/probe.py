"""flag probe."""

from __future__ import annotations

from typing import Any

import click

from flagcore.cli import options


@click.command("probe")
@options.spec
@click.option(
    "--candidate",
    metavar="ID",
    help="A candidate's number in the list of the fastest predicted, baseline, or knobs as name=value,...",
)
@click.option(
    "--top", type=click.IntRange(1), default=1, show_default=True, help="Probe the fastest N predicted.", metavar="N"
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="R",
    help="A global rank (may be repeated) [default: those that tell most].",
)
@options.chip("Plan for this chip instead of the spec's; it must be on this machine.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0, max=86400.0),
    metavar="S",
    help="The longest that a candidate's probes may take [default: control.max_time_per_task].",
)
@click.option("--folder", type=click.Path(), metavar="DIR", help="Keep jobs and logs here [default: nowhere].")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
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
    """Measure single ranks of candidates of SPEC on one device, however many devices SPEC asks for.

    One process plays a rank of the whole world: its layers, its micro-batches in their order, its optimizer. The other
    ranks do not exist, so communication takes no time; that part stays predicted.
    """
    from dataclasses import asdict

    from flagcore import api
    from flagcore.report.formats import render

    if candidate is not None and top != 1:
        raise click.UsageError("give either --candidate or --top")
    found = api.probe(
        spec,
        candidate=candidate,
        top=top,
        ranks=ranks,
        chip=chip,
        seconds=seconds,
        folder=folder,
        without=without,
        on_rank=None if quiet else lambda line: options.say(f"flag: {line}"),
    )
    if form not in ("table", "csv"):
        options.show(render([asdict(each) for each in found], form, {}), form)
        return
    rows = [{"number": number, **rank} for number, each in enumerate(found, start=1) for rank in each.ranks]
    columns = COLUMNS if len(found) > 1 else {name: key for name, key in COLUMNS.items() if name != "#"}
    options.show(render(rows, form, columns), form)
    if form == "table":
        for number, each in enumerate(found, start=1):
            options.say("\n" + "\n".join(_words(number if len(found) > 1 else None, asdict(each))))


def _words(number: int | None, probed: dict[str, Any]) -> list[str]:
    """Return what a table does not show: why ranks failed, what was scaled up, and what follows for the candidate."""
    from flagcore.report.text import candidate_line

    lines = [f"rank {rank['rank']}: {rank['reason']}" for rank in probed["ranks"] if rank["reason"]]
    few = next((rank["measured"] for rank in probed["ranks"] if "measured" in rank and _cut(rank["measured"])), None)
    if few:
        lines.append(f"Times are scaled up to {few['microbatches']} micro-batches; fewer were run.")
    name = f"{number} " if number is not None else ""
    lines.append(candidate_line(f"{name}predicted", {**probed, **probed["predicted"]}))
    lines.append(candidate_line(f"{name}with the probe", {**probed, **probed["combined"]}))
    return lines


def _cut(measured: dict[str, Any]) -> bool:
    return bool(measured["microbatches_run"] < measured["microbatches"])


COLUMNS = {
    "#": "number",
    "rank": "rank",
    "stage": "stage",
    "state": "state",
    "static GiB": "measured.static_gib",
    "~static": "predicted.static_gib",
    "peak GiB": "measured.peak_allocated_gib",
    "~peak": "predicted.peak_allocated_gib",
    "used GiB": "measured.device_used_gib",
    "~used": "predicted.device_used_gib",
    "compute s": "measured.compute_time_s",
    "spread": "measured.compute_spread_s",
    "~compute": "predicted.compute_time_s",
    "optimizer s": "measured.optimizer_time_s",
    "~optimizer": "predicted.optimizer_time_s",
}
