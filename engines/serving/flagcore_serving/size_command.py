"""flag size."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flagcore.cli import options
from flagcore.errors import UsageError
from flagcore.i18n import N_, _, ngettext

if TYPE_CHECKING:
    from flagcore_serving.sizing import Sizing

COLUMNS = {
    "devices": "devices",
    N_("safe devices"): "safe_devices",
    "chip": "chip",
    N_("replicas"): "replicas",
    N_("devices each"): "devices_per_replica",
    N_("~req/s each"): "rate",
    N_("~in flight"): "in_flight",
    "~TTFT p50 s": "ttft_s",
    "~TTFT p99 s": "ttft_p99_s",
    "~TPOT p50 s": "tpot_s",
    N_("cost/h"): "cost_per_hour",
    N_("cost/M tokens"): "cost_per_million_tokens",
    "configuration": "configuration",
}
"""The columns of the table: headings, and fields of `Size`."""
REPLICA = "runs/replica"
"""The folder of the run that confirms a replica."""
HIGHEST = ("--rate", "auto")
"""The option of a search for the highest rate within the limits."""
HOURS = {N_("hour"): "hour", "requests": "requests", N_("peak req/s"): "rate", "replicas": "replicas"}


def _chips(texts: Iterable[str]) -> dict[str, float | None]:
    """Return the chips of `NAME` and `NAME=PRICE`, with their prices. Raises UsageError."""
    from flagcore.domain.units import MAX_PRICE  # late, because its types are slow

    found = dict[str, float | None]()
    for text in texts:
        name, sign, price = text.partition("=")
        number = -1.0
        with suppress(ValueError):
            number = float(price)
        if not name or (sign and not 0 < number <= MAX_PRICE):
            message = N_("--chip {text}: expected NAME or NAME=PRICE, with a price above 0 and at most {most:,}")
            raise UsageError(_(message, text=text, most=MAX_PRICE))
        found[name] = number if sign else None
    return found


LIMITS = {"slo": "--slo", "ttft_p99": "--ttft-p99", "tpot_p99": "--tpot-p99"}
"""The parameters of latency limits, and their options."""


@click.command("size")
@click.argument("spec", required=False, type=click.Path())
@options.model
@options.settings()
@click.option(
    "--rate",
    "total_rate",
    type=options.Rate(0, 1_000_000, min_open=True),
    help=N_("Requests per second [default: those of the spec]."),
)
@click.option(
    "--day",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=N_("Trace with arrival times: the rate is that of its busiest hour, and each hour gets its replicas."),
)
@click.option(
    "--chip",
    "chips",
    multiple=True,
    metavar="NAME[=PRICE]",
    help=N_("Plan for this chip, with the price of a device for an hour (repeatable, to compare chips)."),
)
@click.option(
    "--to",
    "target",
    type=click.Choice(("hpa", "keda", "dynamo")),
    help=N_("Print an autoscaler for the best size: Kubernetes HPA, KEDA, or a configuration of Dynamo's planner."),
)
@click.option(
    "--run",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help=N_("Run of flag tune that measured one replica: its rate replaces predictions, and its spec is the default."),
)
@click.option("--name", help=N_("With --to: name of the Deployment [default: as `flag export` writes it]."))
@options.output
@options.plugins
def size_command(
    spec: Any,
    total_rate: Any,
    day: Path | None,
    chips: tuple[str, ...],
    target: str | None,
    run: Path | None,
    name: str | None,
    form: str,
    without: tuple[str, ...],
) -> None:
    """Show how many devices keep the latency limits of SPEC at a rate of requests, without running anything.

    Each line is a number of replicas, each with the fastest predicted configuration of its devices. They are sorted by
    cost if all chips have a price, otherwise by the number of devices. With --run, the only line is the configuration
    that a run measured.
    """
    from flagcore.api.runs import SPEC  # `flag --help` imports little
    from flagcore.domain.metrics import flat_statistics
    from flagcore.report.text import heading
    from flagcore.spec.plain_data import lookup
    from flagcore_serving.autoscaling import manifest
    from flagcore_serving.sizing import sizing

    if total_rate == "auto":
        raise click.UsageError(_("{value} is not a number", value=f"--rate {total_rate}"))
    if target is not None and form not in ("table", "yaml"):
        raise click.UsageError(_("--to {target} prints YAML: leave out --format {form}", target=target, form=form))
    if run is not None and chips:
        raise click.UsageError(_("--run and --chip exclude each other: a run measured one kind of chip"))
    given = click.get_current_context().params
    changes = (
        LIMITS if spec is not None else {**LIMITS, "settings": "--set", "nodes": "--nodes", "devices": "--devices"}
    )
    if run is not None and (option := next((each for name, each in changes.items() if given[name]), "")):
        text = N_(
            "--run and {option} exclude each other: a run measured its own spec, with the limits of its serve.slo"
        )
        raise click.UsageError(_(text, option=option))
    if spec is None and run is not None:
        spec = str(run / SPEC)
    if spec is None:
        raise click.UsageError(_("SPEC or --model is required"))
    found = sizing(spec, total_rate, None if day is None else str(day), _chips(chips), run, without)
    records = [asdict(each) for each in found.sizes]
    if target is not None:
        options.show(manifest(found, target, name or found.name).removesuffix("\n"), "yaml")
    elif form in ("json", "yaml"):
        hours = [asdict(each) for each in found.hours]
        options.show_record({"rate": found.rate, "sizes": records, "hours": hours}, form)
    else:
        shown = {f"~{heading(name)}": f"limited.{name}" for name in flat_statistics(found.slo)}
        shown = {name: key for name, key in shown.items() if name not in COLUMNS}
        place = list(COLUMNS).index("cost/h")
        columns = dict([*list(COLUMNS.items())[:place], *shown.items(), *list(COLUMNS.items())[place:]])
        columns = {name: key for name, key in columns.items() if any(lookup(each, key) is not None for each in records)}
        options.show_records(records, form, columns)
        if form == "table":
            _explain(found, run)


def _explain(found: Sizing, run: Path | None) -> None:
    """Print what the best size is, the replicas by hour, and how to confirm one replica."""
    from flagcore.domain.metrics import flat_statistics
    from flagcore.report.text import nearest_limit

    best = found.best
    values = {"chip": best.chip, "devices": best.devices, "rate": found.rate, "configuration": best.configuration}
    text = ngettext(
        "{rate:,.10g} requests/s within the limits: {devices} x {chip} in {count} replica ({configuration}).",
        "{rate:,.10g} requests/s within the limits: {devices} x {chip} in {count} replicas, each with {configuration}.",
        best.replicas,
        **values,
    )
    options.show("\n" + text)
    if nearest := nearest_limit(flat_statistics(best.limited), flat_statistics(found.slo))[1]:
        options.show(_("Nearest limit") + f": {nearest}")
    options.say(_("Predicted {load} (serve.profile, serve.slo).", load=found.assumed))
    if best.safe_devices > best.devices:
        text = N_("At the low end of the 80% interval of each replica's rate: {devices} devices.")
        text = text if run is None else N_("At the lowest measured rate of a replica: {devices} devices.")
        options.show(_(text, devices=best.safe_devices))
    if found.hours:
        options.show_records([asdict(each) for each in found.hours], "table", HOURS)
    if run is not None:
        return
    replica: dict[str, Any] = {
        "chip": best.chip,
        "nodes": best.nodes,
        "devices": best.devices_per_replica // best.nodes,
    }
    words = ["flag", "tune", *options.job_words(_settings(found.changes), **replica), *HIGHEST]
    options.say(_("Write the files that start it: {command}", command=_export(found, replica)))
    options.say(_("Confirm one replica by trials: {command}", command=shlex.join([*words, "--run-dir", REPLICA])))
    options.say(
        _("Then size by its measured rate: {command}", command=f"flag size --run {REPLICA} --rate {found.rate:g}")
    )


def _settings(changes: Mapping[str, Any]) -> list[str]:
    """Return the values of `--set` for changed keys of the spec."""
    return [f"{key}={json.dumps(each)}" for key, each in changes.items()]


def _export(found: Sizing, replica: Mapping[str, Any]) -> str:
    """Return the command that exports the servers of the best size: all to Kubernetes if it is a target, or else one.

    `replica`: the chip, the nodes and the devices per node of a replica.
    """
    from flagcore.api.commands.export import export_targets
    from flagcore_serving.sizing import RATE

    values = {name: value for name, value in found.best.candidate.items() if value is not None}
    load = dict(found.best.load)
    rate = ["--rate", str(load.pop(RATE))]  # in place of a number of clients
    keys = [f"{key}={value}" for key, value in load.items()]
    keys += _settings({**found.changes, "auto_tuner.space": values})
    words = ["flag", "export", *options.job_words(keys, **replica), *rate]
    if "kubernetes" in export_targets(found.engine):
        copies = ["--replicas", str(found.best.replicas)] if found.best.replicas > 1 else []
        command = shlex.join([*words, "--to", "kubernetes", *copies])
        return command if found.has_image else f"{command} --image IMAGE"
    return shlex.join([*words, "--to", found.engine])
