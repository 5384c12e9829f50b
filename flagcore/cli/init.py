"""flag init: a new spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from flagcore.cli import options
from flagcore.i18n import N_, _


@click.command("init")
@click.option("--pid", type=click.IntRange(1), help="Read the command and variables of this running process.")
@click.option("--model", metavar="PATH", help="Hugging Face directory, config.json or GGUF file.")
@click.option("--engine", metavar="NAME", help="Engine that trains or serves the model.")
@options.chip(N_("Chip of the cluster [default: detected when the spec is used]."))
@click.option("--nodes", type=click.IntRange(1), help="Number of hosts [default: 1].")
@click.option("--devices", type=click.IntRange(1), help="Devices per host [default: all].")
@click.option("--seq-length", type=click.IntRange(1), help="Training: tokens per sample.")
@click.option("--global-batch-size", type=click.IntRange(1), help="Training: samples per step.")
@click.option("--precision", metavar="NAME", help="Training: number format, such as bf16 or fp8.")
@click.option("--input-len", type=click.IntRange(1), help="Serving: tokens of a prompt.")
@click.option("--output-len", type=click.IntRange(1), help="Serving: tokens of an answer.")
@click.option("--concurrency", type=click.IntRange(1), help="Serving: requests in flight.")
@options.new_file
def init_command(
    pid: int | None,
    model: str | None,
    engine: str | None,
    chip: str | None,
    nodes: int | None,
    devices: int | None,
    output: Path | None,
    **given: Any,
) -> None:
    """Write a new spec with comments.

    On a terminal, missing values are asked for. Otherwise --model and --engine are required, and the other values have
    their defaults.

    With --pid, the spec is that of a running server or job, as with `flag import`: its arguments are the baseline.
    Secrets are left out, and named.
    """
    from flagcore import api
    from flagcore.plugins import WORKLOADS, names

    if pid is not None:
        if ignored := [name for name, value in {**given, "nodes": nodes, "devices": devices}.items() if value]:
            option = "--" + ignored[0].replace("_", "-")
            raise click.UsageError(_("{option} cannot be combined with --pid", option=option))
        process = api.read_process(pid, engine=engine, model=model, chip=chip)
        options.print_notes(process.notes)
        options.write_new(process.as_yaml(), output)
        return
    model = model or _ask(_("Hugging Face directory or GGUF file"), "--model")
    engine = engine or _ask(_("Engine ({names})", names=", ".join(names(WORKLOADS))), "--engine")
    defaults = api.defaults_of(engine)
    if foreign := [name for name, value in given.items() if value is not None and name not in defaults]:
        option = "--" + foreign[0].replace("_", "-")
        raise click.UsageError(_("{option} does not apply to the engine {engine}", option=option, engine=engine))
    chip = chip or _ask(_("Chip; auto: detected when the spec is used"), "", "auto")
    nodes = nodes or _ask(_("Number of hosts"), "", 1)
    devices = devices or _ask(_("Devices per host; auto: all"), "", "auto")
    values = {name: given[name] or _ask(name, "", default) for name, default in defaults.items()}
    cluster = {"chip": chip, "nodes": nodes, "devices_per_node": int(devices) if str(devices).isdecimal() else devices}
    spec = api.new_spec(engine, model, cluster, values)
    options.write_new(spec.as_yaml(), output)
    if output is not None:
        options.say(_("flag: next: flag estimate {file}", file=output))


def _ask(text: str, option: str, default: Any = None) -> Any:
    """Return the answer of the user, the default without a terminal. Raises UsageError if there is none."""
    if sys.stdin.isatty():
        return click.prompt(text, default=default, err=True)
    if default is None:
        raise click.UsageError(_("{option} is required: stdin is not a terminal", option=option))
    return default
