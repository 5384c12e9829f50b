"""A page in the language of its reader: all that flagcore says. Commands, files, logs and values of others stay."""

from __future__ import annotations

import re
from dataclasses import replace

from flagcore.i18n import foreign, said
from flagcore.report.page.blocks import Block, Cell, Chart, Code, Facts, Page, Table, Text

UNIT = re.compile(r"(?:，|, )(s|GiB|占比)$")
"""What stands behind the name of a figure."""


def told(text: str) -> str:
    """Return a text of a page in that language, a unit behind a name in brackets."""
    return UNIT.sub(r"（\1）", said(text)) if foreign() else text


def colon() -> str:
    """Return what stands between a name and what is told of it."""
    return "：" if foreign() else ": "


def in_words(page: Page) -> Page:
    """Return a page in that language. Texts of charts are told where they are drawn, see `charts.drawn`."""
    if not foreign():
        return page
    sections = tuple(
        replace(section, title=told(section.title), blocks=tuple(map(_block, section.blocks)))
        for section in page.sections
    )
    what, between, name = page.title.partition(": ")
    title = told(what) + (colon() + name if between else "")
    return replace(page, title=title, subtitle=told(page.subtitle), sections=sections)


def _block(block: Block) -> Block:
    if isinstance(block, Text):
        return replace(block, text=told(block.text))
    if isinstance(block, Facts):
        return replace(block, items=tuple((told(name), _cell(cell)) for name, cell in block.items))
    if isinstance(block, Code):
        return replace(block, caption=told(block.caption))
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Chart):
        return replace(block, title=told(block.title), says=told(block.says), table=_table(block.table))
    return replace(block, title=told(block.title), blocks=tuple(map(_block, block.blocks)))


def _table(table: Table) -> Table:
    return replace(
        table,
        caption=told(table.caption),
        headings=tuple(map(told, table.headings)),
        rows=tuple(tuple(map(_cell, row)) for row in table.rows),
    )


def _cell(cell: Cell) -> Cell:
    return cell if cell.kept else replace(cell, text=told(cell.text))
