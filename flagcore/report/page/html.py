"""A page as one HTML file that opens offline: style, script and plotly's library are inline.

All data of a run is escaped: text by jinja2, data of charts so that it cannot close its script element. A content
security policy blocks network access and all other scripts.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib.resources import files

from flagcore import __version__
from flagcore.errors import UsageError
from flagcore.i18n import _, language
from flagcore.report.formats import NAMES
from flagcore.report.page.blocks import Block, Chart, Collapsed, Page, drawn

TEMPLATES = files("flagcore.report.page") / "templates"
TAGS = {"en": "en", "zh": "zh-CN"}
"""The HTML language tags."""


def as_html(page: Page) -> str:
    """Return a page as HTML. Raises UsageError if a library is missing."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            _(
                "{package} is not installed: run `pip install plotly jinja2`, or use --format markdown",
                package=error.name,
            )
        ) from None

    charts = [chart for section in page.sections for chart in _charts(section.blocks)]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    library = get_plotlyjs() if charts else ""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string((TEMPLATES / "page.html").read_text(encoding="utf-8"))
    data = [drawn({"traces": chart.traces, "layout": chart.layout}) for chart in charts]
    numbers = {id(chart): number for number, chart in enumerate(charts)}

    def description_of(chart: Chart) -> str:
        return _("Chart: {title}. {summary} The table below shows its data.", title=chart.title, summary=chart.summary)

    return template.render(
        page=page,
        language=TAGS[language()],
        words={name: _(text).replace("{version}", __version__) for name, text in NAMES["html"].items()},
        version=__version__,
        policy=_policy([library, script] if charts else [script]),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        charts=Markup(_inside_script(json.dumps(data, allow_nan=False))),
        charted=bool(charts),
        plotly=Markup(library),
        script=Markup(script),
        kind_of=lambda block: type(block).__name__,
        number_of=lambda block: numbers[id(block)],
        description_of=description_of,
    )


def _charts(blocks: Iterable[Block]) -> Iterator[Chart]:
    """Yield the charts among blocks, also of collapsed ones."""
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Collapsed):
            yield from _charts(block.blocks)


def _policy(scripts: list[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _inside_script(text: str) -> str:
    """Return JSON that cannot end the enclosing script element or start a comment."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
