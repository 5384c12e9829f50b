"""Joins the effects of settings that predictions do not include."""

from collections.abc import Iterable
from dataclasses import replace

from flagcore.domain.engine import Unmodelled
from flagcore.spec.plain_data import Notes


def joined(effects: Iterable[Unmodelled]) -> list[Unmodelled]:
    """Return effects of which those that are the same are one, with all names."""
    names: dict[Unmodelled, list[str]] = {}
    for each in effects:
        names.setdefault(replace(each, name=""), []).append(each.name)
    return [replace(effect, name=", ".join(of_effect)) for effect, of_effect in names.items()]


def note_effects(effects: Iterable[Unmodelled], notes: Notes) -> None:
    """Add an import note on each effect."""
    for each in effects:
        notes.note(each.name, f"is passed to the engine, but not predicted: {each.why}", "train")
