"""A page as one HTML file that opens without a network: style, script and plotly's library are inside.

Everything that comes from a run is escaped: text by jinja2, the charts' data so that it cannot end its script element.
What the page may do is bounded by a policy of its own: it loads nothing, and runs only the scripts that are written
here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from flagcore import __version__
from flagcore.errors import UsageError
from flagcore.i18n import said, spoken
from flagcore.report.page.blocks import Block, Chart, Page
from flagcore.report.page.charts import drawn
from flagcore.report.page.translation import colon, in_words

TEMPLATES = files("flagcore.report.page") / "templates"
TAGS = {"en": "en", "zh": "zh-CN"}
"""What HTML calls each language."""
WORDS = {
    "skip": "Skip to the answer",
    "note": "Note:",
    "contents": "Contents",
    "no_script": "charts need JavaScript; the tables below them have the same figures.",
    "figures": "Its figures as a table",
    "footer": f"Written by flagcore {__version__}. A figure with ~ is predicted, or modelled in part; all others were "
    "measured.",
    "ascending": "Sorted by {0}, ascending",
    "descending": "Sorted by {0}, descending",
}
"""What the template and the script say by themselves."""


def as_html(page: Page) -> str:
    """Return a page as HTML, in the language of its reader.

    Raises UsageError where a library that flagcore depends on is not there.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: `pip install plotly jinja2`, or --format markdown") from None

    page = in_words(page)
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    library = get_plotlyjs() if charts else ""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string((TEMPLATES / "page.html").read_text(encoding="utf-8"))
    data = [drawn({"traces": chart.traces, "layout": chart.layout}) for chart in charts]
    numbers = {id(chart): number for number, chart in enumerate(charts)}

    def number_of(block: Block) -> int:
        return numbers[id(block)]

    return template.render(
        page=page,
        language=TAGS[spoken()],
        colon=colon(),
        words={name: said(text) for name, text in WORDS.items()},
        version=__version__,
        policy=_policy([library, script] if charts else [script]),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        charts=Markup(_inside_script(json.dumps(data, allow_nan=False))),
        charted=bool(charts),
        plotly=Markup(library),
        script=Markup(script),
        kind_of=lambda block: type(block).__name__,
        number_of=number_of,
        aloud=_aloud,
    )


def _aloud(chart: Chart) -> str:
    """Return what stands for a chart where it is not seen."""
    return said(f"Chart: {chart.title}. {chart.says} Its figures are in the table below.")


def _policy(scripts: list[str]) -> str:
    """Return the content security policy of a page with these scripts."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _inside_script(text: str) -> str:
    """Return JSON that cannot end the script element around it, nor begin a comment in it."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
