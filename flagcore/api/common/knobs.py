"""The knobs of a spec that is only data, for the names and the neutral values that texts need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.errors import FlagError
from flagcore.plugins import engines, load_plugins


def knobs_of_spec(data: Mapping[str, Any], used: Iterable[str] = (), without: Collection[str] | None = None) -> Knobs:
    """Return the knobs of a spec's engine by name; none for an engine that is not installed here.

    Plugins are asked for `used` knobs that the engine lacks, those `without` some, or none of them for None.
    """
    sections = (data.get(kind) for kind in ("train", "serve"))
    engine = next((each["engine"] for each in sections if isinstance(each, Mapping) and "engine" in each), None)
    engine = engine[0] if isinstance(engine, list) and engine else engine
    knobs = {}
    if isinstance(engine, str):
        with suppress(FlagError, KeyError):
            knobs = {knob.name: knob for knob in engines()[engine].knobs}
        if without is not None and set(used) - knobs.keys():
            knobs |= {knob.name: knob for knob in load_plugins(without).knobs_on_any_chip(engine)}
    return knobs
