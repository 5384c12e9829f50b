"""flag models."""

import click

from flagcore.cli import options
from flagcore.i18n import _


@click.command("models")
@click.argument("words", nargs=-1)
@options.output
def models_command(words: tuple[str, ...], form: str) -> None:
    """List public models whose names contain all WORDS.

    `flag estimate --model NAME` and the key `model` of a spec accept these names, and those of fine-tuned and quantized
    variants, without a download.
    """
    from flagcore_models.catalogue import similar_models, table  # `flag --help` imports little

    records = table(words)
    if form == "table" and not records:
        near = ", ".join(similar_models("-".join(words)))
        hint = _("did you mean {name}?", name=near) if near else _("`flag models` lists all names")
        options.say(_("no public model has {words} in its name; {hint}", words=" ".join(words), hint=hint))
        return
    options.show_records(records, form, "models")
