"""flag import: specs out of other tuners' files."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options


@click.group("import")
def import_command() -> None:
    """Write a spec out of another tuner's files."""


@import_command.command("flagscale")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--config-name", required=True, metavar="NAME", help="The tree's top file, such as train_auto_tuner.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there [default: stdout].")
def flagscale_command(directory: Path, overrides: tuple[str, ...], config_name: str, output: Path | None) -> None:
    """Write the spec of a hydra tree of FlagScale's, its folder of conf files in DIR.

    OVERRIDES are hydra's (a.b=c). A comment stands at every key that means something else here, or is gone; the same is
    told on stderr. Relative paths in the tree start at the working directory, as for FlagScale.
    """
    from flagcore import api

    found = api.read_tree(directory, config_name, overrides)
    for note in found.notes:
        options.say(f"FlagScale's {note}")
    if output is None:
        click.echo(found.as_yaml(), nl=False)
        return
    if output.exists():
        raise click.UsageError(f"{output} exists; give another file, or remove it")
    try:
        output.write_text(found.as_yaml(), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}") from None
