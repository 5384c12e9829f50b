"""A page as Markdown: charts as tables, all data of a run escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flagcore.i18n import _
from flagcore.report.page.blocks import Block, Chart, Code, Collapsed, Facts, Page, Table, Text

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
        yield "\n".join(f"- {_text(name)}: **{_text(cell.text)}**" for name, cell in block.items)
    elif isinstance(block, Code):
        yield from (_text(block.caption) + ":", _fenced(block.text))
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


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
