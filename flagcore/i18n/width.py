"""Text with double-width characters: its width in columns, and line breaks."""

import re

_CLOSING = re.escape("，。；：、！？）】》」』”’,.;:!?)]}%")
_OPENING = re.escape("([{（【《「『“‘")
_NARROW = r"[^\s⺀-鿿豈-﫿＀-￯、-〿]+"
_PIECES = re.compile(rf"\s+|[{_OPENING}]*(?:{_NARROW}|\S)[{_CLOSING}]*")


def columns(text: str) -> int:
    """Return the width of a line in columns of a terminal."""
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


def cut(text: str, width: int) -> str:
    """Return a text that is cut to a width, with an ellipsis at its end."""
    if columns(text) <= width:
        return text
    kept = ""
    for letter in text:
        if columns(kept + letter) >= width:
            break
        kept += letter
    return kept.rstrip() + "…"


def pieces(text: str) -> list[str]:
    """Return a text as blanks and pieces that no line break may split: words, and wide characters with punctuation."""
    return _PIECES.findall(text)


def wrapped(text: str, width: int, indent: str = "", cut: bool = True) -> list[str]:
    """Return a text as lines of at most `width` columns; all lines except the first have an indent.

    Longer words are cut; without `cut` they have a longer line.
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
