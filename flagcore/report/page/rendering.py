"""Renders a page as HTML, and its blocks as plain text, in which charts become tables.

The HTML file opens offline: style, script and plotly's library are inline. All data of a run is escaped. jinja2 escapes
text; the data of charts is escaped so that it cannot close its script element. A content security policy blocks network
access and all other scripts.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files

from flagcore.i18n import _, language
from flagcore.report import formats
from flagcore.report.formats import NAMES
from flagcore.report.page.blocks import Block, Chart, Facts, Page, Table, Text, drawn

TEMPLATES = files("flagcore.report.page") / "templates"
TAGS = {"en": "en", "zh": "zh-CN"}
"""The HTML language tags."""


def as_html(page: Page) -> str:
    """Return a page as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
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
        words={name: _(text).replace("{version}", version("flagcore")) for name, text in NAMES["html"].items()},
        version=version("flagcore"),
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


def _policy(scripts: list[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _inside_script(text: str) -> str:
    """Return JSON that cannot end the enclosing script element or start a comment."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def plain_text(block: Block | None) -> Iterator[str]:
    """Yield the paragraphs of a block as plain text. Code and collapsed blocks have none."""
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, Facts):
        lines = [f"  {name}: {cell.whole}" for name, cell in block.items]
        yield "\n".join([lines[0].lstrip(), *lines[1:]] if block.lead else lines)
    elif isinstance(block, Chart):
        yield f"{block.summary}\n{plain_table(block.table)}"
    elif isinstance(block, Table):
        yield f"{block.caption}:\n{plain_table(block)}"


def plain_table(table: Table) -> str:
    """Return a table as plain text."""
    return formats.table(table.headings, [[cell.text for cell in row] for row in table.rows])
