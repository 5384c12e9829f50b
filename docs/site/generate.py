"""Writes all that the documentation takes from the code: `python docs/site/generate.py`, or `make reference`.

These are the blocks between `<!-- NAME ARGUMENTS -->` and `<!-- end -->` on the pages. The results are committed; a
test compares them with the code.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.site import cli_page, tables, vendor_pages  # noqa: E402
from tools import releases  # noqa: E402

RENDERERS: Mapping[str, Callable[[str], str]] = {
    "flag": cli_page.render,
    "common": cli_page.render,
    "knobs": tables.render_knobs,
    "rules": tables.render_rules,
    "keys": tables.render_keys,
    "python": tables.render_result,
    "record": tables.render_record,
    "hook": tables.render_hook,
    "vendors": vendor_pages.render_overview,
    "releases": lambda _mark: releases.table(releases.seen()),
}
"""Returns the text of a block from its whole mark, by the first word of the mark."""
BLOCK = re.compile(rf"^<!-- ((?:{'|'.join(RENDERERS)})\b[^>]*) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)


def filled(text: str) -> str:
    """Return the text of a page with current blocks."""
    return BLOCK.sub(_block, text)


def without_blocks(text: str) -> str:
    """Return the text of a page without the content of its blocks: what people wrote."""
    return BLOCK.sub("", text)


def files() -> dict[Path, str]:
    """Return the current text of every file that has generated blocks."""
    pages = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))}
    return {file: filled(text) for file, text in pages.items() if BLOCK.search(text)}


def _block(found: re.Match[str]) -> str:
    render = RENDERERS[found[1].split()[0]]
    return f"<!-- {found[1]} -->\n\n{render(found[1]).strip()}\n\n<!-- end -->"


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
