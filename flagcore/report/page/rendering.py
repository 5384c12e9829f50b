"""Renders a page as HTML or Markdown, and its blocks as plain text. In Markdown and plain text, charts become tables.

The HTML file opens offline: style, script and plotly's library are inline. All data of a run is escaped. jinja2 escapes
text; the data of charts is escaped so that it cannot close its script element. A content security policy blocks network
access and all other scripts.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files

from flagcore.errors import UsageError
from flagcore.i18n import _, language
from flagcore.report import formats
from flagcore.report.formats import NAMES
from flagcore.report.page.blocks import Block, Chart, Code, Collapsed, Facts, Page, Table, Text, drawn

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


SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!])")


def as_markdown(page: Page) -> str:
    """Return a page as GitHub-flavoured Markdown."""
    parts = [f"# {_text(page.title)}", _text(page.subtitle)]
    for section in page.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"**{_('Note:')}** {_text(block.text)}" if block.warning else _text(block.text)
    elif isinstance(block, Facts):
        yield "\n".join(f"- {_text(name)}: **{_text(cell.whole)}**" for name, cell in block.items)
    elif isinstance(block, Code):
        yield from (_text(block.caption) + ":", _code_block(block.text))
    elif isinstance(block, Table):
        yield from (_text(block.caption) + ":", _table(block))
    elif isinstance(block, Chart):
        yield from (f"### {_text(block.title)}", _text(block.summary), *_block(block.table))
    elif isinstance(block, Collapsed):
        yield f"### {_text(block.title)}"
        for inner in block.blocks:
            yield from _block(inner)


def _table(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = line(["---:" if each else "---" for each in table.figures])
    rows = [line([_text(cell.text) for cell in row]) for row in table.rows]
    return "\n".join([line([_text(heading) for heading in table.headings]), rule, *rows])


def _text(text: str) -> str:
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;")


def _code_block(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def plain_text(block: Block | None) -> Iterator[str]:
    """Yield a block as paragraphs of plain text. Code and collapsed blocks yield nothing."""
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
