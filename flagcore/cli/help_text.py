"""click's help and usage errors in another language than English."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable

import click

from flagcore.i18n import said, said_from
from flagcore.i18n.width import columns, left, wrapped

EXTRA = re.compile(r"(?P<help>.*?)(?:^| )\[(?P<extra>default: [^\]]*|required|[^\]]*[<>]=?[^\]]*)\]")
"""What click puts behind the help of an option: its default, its range, whether it is required."""


class Told(click.HelpFormatter):
    """Writes what click says in the user's language, wrapped by columns."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the usage line."""
        head = f"{said('Usage')}：{prog} " if prefix is None else f"{prefix}{prog} "
        self.write("\n".join(wrapped(head + args, self.width, " " * columns(head))) + "\n")

    def write_heading(self, heading: str) -> None:
        """Write a section's heading."""
        self.write(f"{'':>{self.current_indent}}{said(heading)}：\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        indent = " " * self.current_indent
        paragraphs = [said(" ".join(each.split())) for each in text.split("\n\n")]
        filled = [wrapped(indent + each, self.width, indent) for each in paragraphs]
        self.write("\n\n".join("\n".join(lines) for lines in filled) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options or commands, each with its help."""
        pairs = list(rows)
        first = min(max(columns(name) for name, _ in pairs), col_max) + col_spacing
        indent = " " * self.current_indent
        for name, told in pairs:
            lines = wrapped(_help(" ".join(told.split())), max(self.width - first - self.current_indent, 10))
            if columns(name) <= first - col_spacing:
                lines[0] = left(name, first) + lines[0]
            else:
                lines.insert(0, name)
                lines[1] = " " * first + lines[1]
            lines[1:] = [line if line.startswith(" " * first) else " " * first + line for line in lines[1:]]
            self.write("".join(f"{indent}{line}".rstrip() + "\n" for line in lines))


class _Lines(logging.Formatter):
    """Writes warnings in the user's language."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return said(super().format(record))


def error_text(error: click.ClickException) -> str:
    """Return a usage error as click shows it, in the user's language."""
    text = io.StringIO()
    error.show(text)
    return said(text.getvalue().rstrip("\n"))


def use() -> None:
    """Have click and warnings speak the user's language."""
    click.Context.formatter_class = Told
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Lines())


def _help(text: str) -> str:
    """Return the help of an option or command, which click may have cut."""
    found = EXTRA.fullmatch(text)
    if found is None:
        return said_from(text)
    extra = "; ".join(said(each) for each in found["extra"].split("; "))
    return f"{said_from(found['help'])} [{extra}]".strip()
