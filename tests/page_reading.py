"""An HTML page as a tree, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from flagcore.domain.plan import Counts
from flagcore.report.run import RunData

VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Element:
    """One element with its attributes and, in order, what is in it."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def every(self, *tags: str) -> Iterator[Element]:
        """Yield the elements below this one, of some tags or of any."""
        for each in self.inside:
            if isinstance(each, Element):
                if not tags or each.tag in tags:
                    yield each
                yield from each.every(*tags)

    @property
    def text(self) -> str:
        """All text in it."""
        return "".join(each if isinstance(each, str) else each.text for each in self.inside)

    @property
    def value(self) -> float | None:
        """The figure behind the text."""
        return float(self.attributes["data-value"]) if "data-value" in self.attributes else None


@dataclass
class Read:
    """A page."""

    root: Element

    def section(self, anchor: str) -> Element:
        """Return a section."""
        return next(each for each in self.root.every("section") if each.attributes["id"] == anchor)

    @property
    def sections(self) -> list[str]:
        """The anchors of all sections."""
        return [each.attributes["id"] for each in self.root.every("section")]

    def facts(self, anchor: str) -> dict[str, Element]:
        """Return the facts of a section, by name."""
        pairs = (each for facts in self.section(anchor).every("dl") for each in facts.every("div"))
        return {next(each.every("dt")).text: next(each.every("dd")) for each in pairs}

    def rows(self, anchor: str, caption: str) -> list[dict[str, Element]]:
        """Return the rows of the table of a section whose caption begins so, by heading."""
        for table in self.section(anchor).every("table"):
            if next(table.every("caption")).text.startswith(caption):
                return [dict(zip(headings(table), row, strict=True)) for row in cells(table)]
        raise LookupError(caption)

    @property
    def charts(self) -> list[Element]:
        """All charts."""
        return [each for each in self.root.every("div") if each.attributes.get("class") == "plot"]


def headings(table: Element) -> list[str]:
    """Return a table's headings."""
    return [each.text for head in table.every("thead") for each in head.every("th")]


def cells(table: Element) -> list[list[Element]]:
    """Return the cells of a table's rows."""
    return [list(row.every("th", "td")) for body in table.every("tbody") for row in body.every("tr")]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "wbr":  # where a long word may be broken: no content
            return
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def read(html: str) -> Read:
    """Return a page; every element must be closed in order."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert len(parser.open) == 1, f"<{parser.open[-1].tag}> is not closed"
    return Read(parser.open[0])


def run_data(insight: Mapping[str, Any] | None = None, folder: Path = Path(), **fields: Any) -> RunData:
    """Return a run without trials; `fields` are further ones of result.json."""
    counts = dict.fromkeys(Counts.__slots__, 0) | {"illegal": {}, "pruned": {}}
    objective = {"name": "tokens_per_second_per_device"}
    plain = {"chip": "x", "devices": 1, "objective": objective, "fidelity": "run", "counts": counts}
    return RunData.from_json({**plain, **fields}, folder, insight=insight or {})
