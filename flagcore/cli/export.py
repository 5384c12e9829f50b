"""flag export: files that start a candidate."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options


def _targets(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    from flagcore import api

    return [name for name in api.export_targets() if name.startswith(typed)]


@click.command("export")
@click.argument("where", type=click.Path(exists=True, path_type=Path), metavar="RUN|SPEC")
@click.argument("candidate", nargs=-1, metavar="[CANDIDATE]...")
@click.option(
    "--to",
    "target",
    required=True,
    metavar="TARGET",
    shell_complete=_targets,
    help="The engine, slurm, kubernetes, compose or dynamo (servers), an importer, or a target of a plugin.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder [default: NAME-TARGET].")
@click.option("--name", help="Name of the job and of its files [default: name of the file or directory].")
@click.option("--image", help="Container image with the program of the candidate, for kubernetes and dynamo.")
@click.option(
    "--kind", type=click.Choice(("jobset", "pytorchjob", "volcano")), help="Kind of a Kubernetes job [default: jobset]."
)
@click.option(
    "--volume", metavar="CLAIM:PATH", help="Persistent volume claim and its mount point, for kubernetes and dynamo."
)
@options.chip()
@options.plugins
def export_command(
    where: Path,
    candidate: tuple[str, ...],
    target: str,
    output: Path | None,
    name: str | None,
    chip: str | None,
    without: tuple[str, ...],
    **given: str | None,
) -> None:
    """Write files that start a candidate of RUN, or of SPEC as a plan.

    CANDIDATE is as for `flag explain` [default: best]. The paths of the files are printed.
    """
    from flagcore import api

    exported = api.export(
        where,
        target,
        " ".join(candidate) or "best",
        output=output,
        chip=chip,
        name=name,
        options={key: value for key, value in given.items() if value is not None},
        without=without,
    )
    for file in exported.files:
        click.echo(file)
    for note in exported.notes:
        options.say(f"flag: {note}")
