"""flag manifest: jobs for Kubernetes."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options


@click.command("manifest")
@click.argument("where", type=click.Path(exists=True, path_type=Path), metavar="SPEC")
@click.option("--kind", type=click.Choice(("jobset", "pytorchjob", "volcano")), required=True, help="Kind of the job.")
@click.option("--image", required=True, help="Container image with flagcore.")
@click.option("--name", help="Name of the job [default: name of the file or directory].")
@click.option("--volume", metavar="CLAIM:PATH", help="Persistent volume claim and its mount point.")
@options.plugins
def manifest_command(
    where: Path, kind: str, image: str, name: str | None, volume: str | None, without: tuple[str, ...]
) -> None:
    """Write a Kubernetes job that tunes SPEC.

    All files must have the same paths in the image or on the volume as on this machine.
    """
    from flagcore import api
    from flagcore.report.formats import as_yaml

    manifest, notes = api.manifest(where, kind=kind, image=image, name=name, volume=volume, without=without)
    click.echo(as_yaml(manifest))
    for note in notes:
        options.say(f"flag: {note}")
