"""The generated parts of pages: commands, knobs, keys of the spec, constants."""

from __future__ import annotations

from docs.site import cli_page, constants, engine_tables, flagscale_names, spec_tables


def filled(text: str) -> str:
    """Return the text of a page with all generated parts."""
    for part in (cli_page, engine_tables, spec_tables, flagscale_names, constants):
        text = part.fill(text)
    return text
