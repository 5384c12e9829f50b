"""A page as Markdown: charts as their tables, everything from a run escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flagcore.i18n import said
from flagcore.report.page.blocks import Block, Cell, Chart, Code, Facts, Folded, Page, Table, Text
from flagcore.report.page.translation import colon, in_words

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!])")


def as_markdown(page: Page) -> str:
    """Return a page as Markdown with tables and fenced code as GitHub reads them, in the language of its reader."""
    page = in_words(page)
    parts = [f"# {_text(page.title)}", _text(page.subtitle)]
    for section in page.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"**{said('Note:')}** {_text(block.text)}" if block.warns else _text(block.text)
    elif isinstance(block, Facts):
        yield "\n".join(f"- {_text(name)}{colon()}**{_text(cell.text)}**" for name, cell in block.items)
    elif isinstance(block, Code):
        yield from (_text(block.caption) + colon().rstrip(), _fenced(block.text))
    elif isinstance(block, Table):
        yield from (_text(block.caption) + colon().rstrip(), _table(block))
    elif isinstance(block, Chart):
        yield from (f"### {_text(block.title)}", _text(block.says), *_block(block.table))
    elif isinstance(block, Folded):
        yield f"### {_text(block.title)}"
        for inner in block.blocks:
            yield from _block(inner)


def _table(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = line(["---:" if each else "---" for each in table.figures])
    rows = [line([_cell(cell) for cell in row]) for row in table.rows]
    return "\n".join([line([_text(heading) for heading in table.headings]), rule, *rows])


def _cell(cell: Cell) -> str:
    return _text(cell.text)


def _text(text: str) -> str:
    """Return text in one line with what Markdown or HTML would read in it escaped."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;")


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
