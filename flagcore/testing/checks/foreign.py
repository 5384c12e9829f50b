"""Chips of other vendors and unknown engines: the plugin must leave them to others."""

from __future__ import annotations

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.plugins.installed import one_line
from flagcore.testing.examples import FOREIGN_CHIP, questions
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Subject


@check("return None unless chip.vendor is yours")
def foreign_chips_get_no_answer(plugin: Subject) -> Problems:
    for hook, arguments in questions(FOREIGN_CHIP):
        try:
            answer = plugin.ask(hook, arguments)
        except SpecError:
            raise  # of a file, which another check may have reported
        except Exception as error:
            yield f"{hook} raises {one_line(error)} for a chip of another vendor"
            continue
        if answer is not None and answer not in ((), [], {}):
            yield f"{hook} answers for a chip of another vendor"


@check("return None if `kind` is neither train nor serve")
def unknown_engines_get_no_answer(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        about: dict[str, Chip | str | None] = {"chip": chip, "engine": "none", "engine_version": None, "kind": ""}
        if plugin.ask("flagcore_engine_support", about) is not None:
            yield f"flagcore_engine_support answers for an unknown engine on {chip.name}"
