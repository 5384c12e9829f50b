"""Text of double-width letters: how many columns it takes, and how it is wrapped."""

from __future__ import annotations

import re
import textwrap
from unicodedata import combining, east_asian_width

CLOSING = "，。；：、！？）】》」』”’,.;:!?)]}%"
"""What does not begin a line."""
OPENING = "（【《「『“‘"
"""What does not end a line."""
_PIECES = re.compile(r"\s+|[^\s⺀-鿿豈-﫿＀-￯、-〿]+|.", re.DOTALL)
"""Blanks, a word of narrow letters, or one wide letter."""


def columns(text: str) -> int:
    """Return the columns of a terminal that a line takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def left(text: str, width: int) -> str:
    """Return a text filled up with blanks to a width."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Return a text with blanks before it up to a width."""
    return " " * (width - columns(text)) + text


def words(text: str) -> list[str]:
    """Return what a line may not be broken in: words of narrow letters, and wide letters with their punctuation."""
    if text.isascii():
        return text.split()
    return [piece for piece in pieces(text) if not piece.isspace()]


def wrapped(text: str, width: int, indent: str = "", cut: bool = True) -> list[str]:
    """Return a text as lines of no more columns than `width`, those after the first with an indent.

    A word that is longer is cut; without `cut` it stands in a line that is as long.
    """
    if text.isascii():
        lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=cut)
        return lines or [""]
    lines, line = [], ""
    for piece in pieces(text):
        while columns(line + piece.rstrip()) > width:
            if line.strip():
                lines.append(line.rstrip())
                line, piece = indent, piece.lstrip()
                if columns(line + piece) <= width:
                    break
            some = max(_that_fit(piece, width - columns(line)), 1) if cut else len(piece)
            if some >= len(piece):
                break
            lines.append(line + piece[:some])
            line, piece = indent, piece[some:]
        line += piece if line.strip() or not lines else piece.lstrip()
    return [*lines, line.rstrip()] if line.strip() else lines or [""]


def pieces(text: str) -> list[str]:
    """Return a text as blanks and what stands between two places where a line may end."""
    found: list[str] = []
    for piece in _PIECES.findall(text):
        if found and ((piece[0] in CLOSING and not found[-1].isspace()) or found[-1][-1] in OPENING):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def _that_fit(text: str, width: int) -> int:
    """Return how many letters of a text fit."""
    taken = 0
    for number, letter in enumerate(text):
        taken += columns(letter)
        if taken > width:
            return number
    return len(text)
