"""The command flag init: new specs."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from flagcore import api
from flagcore.cli import options
from flagcore.errors import FlagError
from flagcore.i18n import N_, _


@click.command("init")
@click.option("--model", metavar="MODEL", help=options.MODEL_HELP)
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
@click.option("--slo", multiple=True, metavar="LIMIT", help="Serving: latency limit, such as p99 ttft 1s (repeatable).")
@options.new_file
def init_command(
    model: str | None,
    engine: str | None,
    chip: str | None,
    nodes: int | None,
    devices: int | None,
    slo: tuple[str, ...],
    output: Path | None,
    **given: Any,
) -> None:
    """Write a new spec with comments.

    On a terminal, missing values are asked for, again after an invalid answer. Otherwise --model and --engine are
    required, and the other values have their defaults.
    """
    from flagcore.plugins import ENGINES, names

    text = _("Directory with a config.json, GGUF file, or name of a public model")
    model = model or _ask(text, "--model", check=partial(api.model_from, base=Path()))
    engine = engine or _ask(_("Engine ({names})", names=", ".join(names(ENGINES))), "--engine", check=api.defaults_of)
    values = api.defaults_of(engine)
    if foreign := [name for name, value in given.items() if value is not None and name not in values]:
        option = "--" + foreign[0].replace("_", "-")
        raise click.UsageError(_("{option} does not apply to the engine {engine}", option=option, engine=engine))
    defaults = {**CLUSTER, **values}
    answers = {"chip": chip, "nodes": nodes, "devices_per_node": devices} | given

    def made(**more: Any) -> Any:
        every = {**defaults, **{key: value for key, value in {**answers, **more}.items() if value is not None}}
        return api.new_spec(engine, model, {key: every[key] for key in CLUSTER}, {key: every[key] for key in values})

    made()  # what is given must be valid before anything is asked
    for name in (name for name in defaults if answers.get(name) is None):
        check = partial(lambda name, answer: made(**{name: answer}), name)
        answers[name] = _ask(_(CLUSTER_TEXTS.get(name, name)), "", defaults[name], check)
    spec = made()
    data = api.LoadedSpec("spec", spec.data)
    if "serve" in spec.data and not slo:
        text = _("Latency limits, such as p99 ttft 1s, p99 tpot 50ms; none: no limits")
        answer = _ask(text, "", NONE, lambda answer: answer == NONE or api.with_limits(data, [answer]))
        slo = () if answer == NONE else (answer,)
    options.write_new(replace(spec, data=api.with_limits(data, slo).data) if slo else spec, output)
    if output is not None:
        options.say(_("flag: next: flag estimate {file}", file=output))


CLUSTER = {"chip": "auto", "nodes": 1, "devices_per_node": "auto"}
CLUSTER_TEXTS = {
    "chip": N_("Chip; auto: detected when the spec is used"),
    "nodes": N_("Number of hosts"),
    "devices_per_node": N_("Devices per host; auto: all"),
}
NONE = "none"


def _ask(text: str, option: str, default: Any = None, check: Callable[[Any], object] = str) -> Any:
    """Return the user's answer, or the default without a terminal. Raises UsageError if there is neither.

    `check`: raises FlagError for an invalid answer, which is then asked for again.
    """

    def valid(answer: Any) -> Any:
        with suppress(ValueError):
            answer = (float if isinstance(default, float) else int)(answer)
        try:
            check(answer)
        except FlagError as error:
            raise click.UsageError(str(error)) from None
        return answer

    if sys.stdin.isatty():
        return click.prompt(text, default=default, err=True, value_proc=valid)
    if default is None:
        raise click.UsageError(_("{option} is required: stdin is not a terminal", option=option))
    return default
