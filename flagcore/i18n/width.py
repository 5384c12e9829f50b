"""Measures, pads, cuts and wraps text that may contain double-width characters."""

import re

_CLOSING = re.escape("，。；：、！？）】》」』”’,.;:!?)]}%")
_OPENING = re.escape("([{（【《「『“‘")
_NARROW = r"[^\s⺀-鿿豈-﫿＀-￯、-〿]+"
_PIECES = re.compile(rf"\s+|[{_OPENING}]*(?:{_NARROW}|\S)[{_CLOSING}]*")


def columns(text: str) -> int:
    """Return the width of a line in terminal columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def left(text: str, width: int) -> str:
    """Return a text aligned to the left: padded on its right to `width` columns."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Return a text aligned to the right: padded on its left to `width` columns."""
    return " " * (width - columns(text)) + text


def pieces(text: str) -> list[str]:
    """Split a text where lines may break: into blanks, words, and wide characters with their punctuation."""
    return _PIECES.findall(text)


def wrapped(text: str, width: int, indent: str = "", cut: bool = True) -> list[str]:
    """Wrap a text to lines of at most `width` columns.

    `indent`: precedes all lines except the first.
    `cut`: whether words that are longer than a line are cut. Otherwise their lines are longer.
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
