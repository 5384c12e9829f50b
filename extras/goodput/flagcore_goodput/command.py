"""flag goodput."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flagcore.cli import options
from flagcore.errors import UsageError
from flagcore.i18n import N_, _

if TYPE_CHECKING:
    from flagcore.api.inputs import SpecLike
    from flagcore.domain.knob import Knobs

TOP = 5
ENGINE = "megatron"
"""The engine that trains a model without a spec."""
OUTPUT = N_("Write the spec of the first candidate, with the flags of its saves in train.command.")
CSV = {each: each for each in ("number", "way", "step_time_s", "tokens_per_second")}


@click.command("goodput")
@click.argument("where", required=False, type=click.Path(exists=True, path_type=Path), metavar="[SPEC|RUN]")
@click.option("--model", metavar="MODEL", help=N_("This model instead of SPEC: a path or public name."))
@click.option("--engine", metavar="NAME", help=N_("With --model: engine [default: megatron]."))
@click.option("--nodes", type=click.IntRange(1), help=N_("Number of hosts [default: of SPEC, else 1]."))
@click.option("--devices", type=click.IntRange(1), help=N_("Devices per host [default: of SPEC, all, or usual]."))
@click.option("--top", type=click.IntRange(min=1), default=TOP, show_default=True, help="Number of candidates to list.")
@options.chip()
@options.plugins
@options.output
@options.raw_settings
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help=OUTPUT)
def goodput_command(
    where: Path | None,
    model: str | None,
    engine: str | None,
    nodes: int | None,
    devices: int | None,
    top: int,
    chip: str | None,
    without: Collection[str],
    form: str,
    settings: Sequence[str],
    output: Path | None,
) -> None:
    """Rank candidates by tokens per day of the whole job, with its saves and failures.

    The section job of the spec says what is known about the job. For what is unknown, stderr shows from where it
    matters.
    """
    sizes = {"nodes": nodes, "devices_per_node": devices}
    settings = (*settings, *(f"cluster.{key}={value}" for key, value in sizes.items() if value is not None))
    source = _source(where, model, engine, chip)
    with options.patience(_("flag: predicting the candidates")):
        records, notes, knobs = goodput(source, top, chip, without, settings)
    if form != "table":
        options.show_records(records, form, CSV)
    else:
        options.show("\n\n".join(_tables(records, knobs)), form)
    for note in notes:
        options.say(f"flag: {note}")
    if output is not None:
        from flagcore.report.formats import as_yaml

        chosen, flags = chosen_spec(source, records[0], settings), records[0]["ways"][records[0]["way"]]["settings"]
        options.write_file(output, as_yaml(chosen) + "\n")
        if not (chosen["train"].get("command") and flags.startswith("--")):
            text = N_("flag: {file} does not have the settings of its saves: add {flags} to the program")
            options.say(_(text, file=output, flags=flags))


def _source(where: Path | None, model: str | None, engine: str | None, chip: str | None) -> SpecLike:
    """Return the spec or run of a command, or a new spec for its model. Raises UsageError, SpecError."""
    if (where is None) == (model is None):
        raise click.UsageError(_("one of SPEC, RUN and --model is required"))
    if where is not None:
        if engine is not None:
            raise click.UsageError(_("--engine requires --model; with SPEC, use --set"))
        return where
    from flagcore.api.commands.doctor import require_chip
    from flagcore.api.commands.importing import spec_of_model

    spec = spec_of_model(str(model), engine=engine or ENGINE, chip=chip)
    require_chip(spec)
    return spec


def chosen_spec(where: SpecLike, record: Mapping[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spec of the candidate of a record. Flags of its best way to save are added to `train.command`.

    Raises UsageError if the command is a script, whose programs would not get them.
    """
    from flagcore_importers.shell import is_script

    from flagcore.api.inputs import spec_data, with_absolute_paths, with_settings
    from flagcore.api.runs import SPEC

    file, data = spec_data(
        with_settings(where / SPEC if isinstance(where, Path) and where.is_dir() else where, settings)
    )
    data, words = with_absolute_paths(data, file.parent), shlex.split(record["ways"][record["way"]]["settings"])
    if data["train"].get("command") and words[0].startswith("--"):
        if is_script(data["train"]["command"], data["train"].get("directory")):
            text = N_("train.command is a script, which may not hand flags on: add {words} to its program, without -o")
            raise UsageError(_(text, words=shlex.join(words)))
        data["train"] = {**data["train"], "command": [*data["train"]["command"], *words]}
    tuner = {key: value for key, value in (data.get("auto_tuner") or {}).items() if key != "baseline"}
    return {**data, "auto_tuner": {**tuner, "space": record["candidate"]}}


def goodput(
    where: SpecLike,
    top: int = TOP,
    chip: str | None = None,
    without: Collection[str] = (),
    settings: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], list[str], Knobs]:
    """Return a record of each of the `top` candidates of a spec or run by tokens per day, notes, and the knobs.

    `settings` (`KEY=VALUE`) change the spec; of a run, only its job. Raises the errors of `flagcore.errors`.
    """
    from flagcore.api.inputs import spec_data, with_settings
    from flagcore.api.jobs import expected_seconds
    from flagcore.api.runs import SPEC, load_snapshot
    from flagcore_goodput.goodput import WholeJob, break_evens, ranked, started_s
    from flagcore_goodput.job import PUBLISHED, read_job

    is_run = isinstance(where, str | Path) and Path(where).is_dir()
    if is_run and (others := [each for each in settings if not each.startswith("job.")]):
        raise UsageError(
            _("--set {key}: only the section job of a run can be changed", key=others[0].partition("=")[0])
        )
    source = with_settings(Path(str(where)) / SPEC if is_run else where, settings)
    job = read_job(*spec_data(source))
    snapshot = load_snapshot(where if is_run else source, chip, without)
    notes, start_s = list[str](), started_s(snapshot)
    if job.restart_time is None and start_s is not None:
        job = job.model_copy(update={"restart_time": start_s})
        text = N_(
            "job.restart_time = {seconds:.3g} s, the start of the trials; until a failure is noticed, more time passes"
        )
        notes.append(_(text, seconds=start_s))
    whole = WholeJob.of(job, snapshot.problem)
    found = ranked(snapshot, whole, top)
    if not is_run and (text := expected_seconds(snapshot.problem, found[0].step_s, snapshot.plugins)[1]):
        notes.append(_("{expected} The tables have the predicted time.", expected=text))
    notes += break_evens(whole, found[0])
    missing = [
        name for name in ("device_mtbf", "storage_bytes_per_second", "restart_time") if getattr(job, name) is None
    ]
    if missing:
        notes.insert(0, _("unknown: {keys}", keys=", ".join(f"job.{name}" for name in missing)))
    if published := PUBLISHED.get(str(job.device_mtbf)):
        text = N_("{hours:,} h between failures of a device: {devices}; {source}")
        notes.append(_(text, **published))
    return [each.record(whole) for each in found], notes, snapshot.problem.knobs


def _tables(records: list[dict[str, Any]], knobs: Knobs) -> Iterator[str]:
    """Yield a table of candidates, each with its best way to save, and one of the ways of the first candidate."""
    from flagcore.report.formats import shown, size_text, table
    from flagcore.report.text import values_text

    def cells(each: dict[str, Any]) -> list[str]:
        share = each["goodput"]
        day = each["tokens_per_day"]
        steps = each["steps"]
        return [
            shown(each["hold_s"]),
            shown(each["write_s"]),
            shown(steps and int(steps)),
            shown(each["interval_s"] and each["interval_s"] / 60.0),
            "-" if share is None else f"{share:.1%}",
            shown(day and day / 1e9),
            *(shown(each[key]) for key in asked),
        ]

    first = records[0]["ways"][records[0]["way"]]
    asked = {key: name for key, name in {"days": _("days"), "tokens": _("tokens")}.items() if first[key]}
    headings = [_("held s"), _("written s"), _("steps"), _("minutes"), _("goodput"), _("G tokens/day"), *asked.values()]
    rows = []
    for each in records:
        start = (str(each["number"]), values_text(each["candidate"], knobs), shown(each["tokens_per_second"]))
        rows.append([*start, each["way"], *cells(each["ways"][each["way"]])])
    yield table(["#", _("candidate"), _("tokens/s"), _("saves"), *headings], rows)
    ways = records[0]["ways"]
    sizes = [_("checkpoint"), _("of a rank"), _("pinned on a host")]
    rows = [
        [name, *(size_text(each[key]) for key in ("total_bytes", "rank_bytes", "pinned_bytes")), *cells(each)]
        for name, each in ways.items()
    ]
    yield table([_("saves"), *sizes, *headings], rows)
    yield "\n".join(f"{name}: {each['settings']}" for name, each in ways.items())
