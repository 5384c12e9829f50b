"""flag manifest."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from flagcore.cli import options
from flagcore.errors import UsageError
from flagcore.i18n import N_, _


@click.command("manifest")
@click.argument("where", type=click.Path(exists=True, path_type=Path), metavar="SPEC")
@click.option("--kind", type=click.Choice(("jobset", "pytorchjob", "volcano")), required=True, help="Kind of the job.")
@click.option("--image", required=True, help="Container image with flagcore.")
@click.option("--name", help="Name of the job [default: name of the file or directory].")
@options.pods
@options.raw_settings
@options.chip()
@options.plugins
def manifest_command(where: Path, **given: Any) -> None:
    """Write a Kubernetes job that tunes SPEC.

    All files must have the same paths in the image or on the volume as on this machine.
    """
    from flagcore.report.formats import as_yaml

    manifest, notes = manifest_of_spec(where, **given)
    options.show(as_yaml(manifest), "yaml")
    for note in notes:
        options.say(f"flag: {note}")


def manifest_of_spec(
    spec: Path,
    *,
    name: str | None = None,
    chip: str | None = None,
    settings: Sequence[str] = (),
    without: Collection[str] = (),
    **options: str | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of a job that tunes a spec, and notes for the user.

    `options`: `kind` (jobset, pytorchjob or volcano) and `image` are required; for the others see `ExportJob`. All
    files must have the same paths in the image or on the volume. `chip` and `settings` (`KEY=VALUE`) change the spec,
    and the job passes them to `flag tune`. Raises the errors of `flagcore.errors`.
    """
    from flagcore.api.inputs import with_settings
    from flagcore.api.runs import load_snapshot
    from flagcore.domain.secrets import secrets_in_arguments
    from flagcore.launchers.script import checked_name, job_name
    from flagcore_kubernetes.job import manifest  # `flag --help` imports little

    if spec.is_dir():
        text = N_(
            "expected a spec, but {run} is a run directory; to export its best configuration, use "
            "`flag export {run} --to kubernetes`"
        )
        raise UsageError(_(text, run=spec))
    name = job_name(spec.stem) if name is None else checked_name(name)
    if secrets_in_arguments(settings):
        raise UsageError(_("the command contains a secret; pass it in a variable"))
    changes = [word for each in settings for word in ("--set", each)] + (["--chip", chip] if chip else [])
    platform = load_snapshot(with_settings(spec, settings), chip, without).problem.platform
    given = {key: value for key, value in options.items() if value}
    return manifest(platform, spec, name=name, options=given, changes=changes)
