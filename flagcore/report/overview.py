"""The overview of runs as an HTML page that reloads itself and has no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from flagcore.i18n import language
from flagcore.report.names import NAMES

TEMPLATE = files("flagcore.report") / "templates" / "overview.html"


def overview_page(root: str, lines: Sequence[Any], links: Mapping[str, str], refresh: int, now: float) -> str:
    """Return the page of some runs. `links` are the paths of their reports by name, `now` is the time in seconds.

    All text is escaped.
    """
    from jinja2 import Environment, StrictUndefined

    from flagcore.i18n import _

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        root=root,
        lines=lines,
        links=links,
        refresh=refresh,
        language=language(),
        words={name: _(text) for name, text in NAMES["overview"].items()},
        ago=lambda then: _ago(now - then),
    )


def _ago(seconds: float) -> str:
    """Return a duration in its largest unit."""
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= size), f"{max(seconds, 0):.0f} s")
