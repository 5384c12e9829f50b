"""Text with double-width letters: the columns that it takes, and where its lines may break."""

from __future__ import annotations

import re

_CLOSING = re.escape("，。；：、！？）】》」』”’,.;:!?)]}%")
_OPENING = re.escape("([{（【《「『“‘")
_NARROW = r"[^\s⺀-鿿豈-﫿＀-￯、-〿]+"
_PIECES = re.compile(rf"\s+|[{_OPENING}]*(?:{_NARROW}|\S)[{_CLOSING}]*")


def columns(text: str) -> int:
    """Return the columns of a terminal that a line takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def left(text: str, width: int) -> str:
    """Return a text padded to a width on its right."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Return a text padded to a width on its left."""
    return " " * (width - columns(text)) + text


def pieces(text: str) -> list[str]:
    """Return a text as blanks and what no line break may split: words, and wide letters with their punctuation."""
    return _PIECES.findall(text)


def wrapped(text: str, width: int, indent: str = "", cut: bool = True) -> list[str]:
    """Return a text as lines of at most `width` columns, all but the first with an indent.

    A longer word is cut; without `cut` its line is as long as the word.
    """
    lines, line = [], ""
    for piece in pieces(text):
        while columns(line + piece.rstrip()) > width:
            if line.strip():
                lines.append(line.rstrip())
            elif cut and len(piece) > 1:
                fitting = max(sum(columns(line + piece[:end]) <= width for end in range(1, len(piece) + 1)), 1)
                lines.append(line + piece[:fitting])
                piece = piece[fitting:]
            else:
                break
            line, piece = indent, piece.lstrip()
        if line.strip() or not lines or not piece.isspace():
            line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines
