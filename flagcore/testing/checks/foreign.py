"""Chips of other vendors and unknown engines: the plugin must leave them to others."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.plugins.installed import one_line
from flagcore.testing.examples import FOREIGN_CHIP, questions
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

FIX = "return None unless chip.vendor is yours"


def foreign_chips_get_no_answer(plugin: Subject) -> Iterator[Problem]:
    for hook, arguments in questions(FOREIGN_CHIP):
        if hook not in plugin.loaded.plugins[0].hooks:
            continue
        try:
            answer = plugin.ask(hook, arguments)
        except Exception as error:
            yield Problem(f"{hook} raises {one_line(error)} for a chip of another vendor", fix=FIX)
            continue
        empty = isinstance(answer, (list, tuple, dict)) and not answer
        if answer is not None and not empty:
            yield Problem(f"{hook} answers for a chip of another vendor", fix=FIX)


def unknown_engines_get_no_answer(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        about = {"chip": chip, "engine": "no such engine", "engine_version": None, "kind": ""}
        if plugin.ask("flagcore_engine_support", about) is not None:
            yield Problem(
                f"flagcore_engine_support answers for an unknown engine on {chip.name}",
                "return None if `kind` is neither train nor serve",
            )
