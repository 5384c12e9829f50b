"""Reads `maturity.yaml`: what of a plugin ran on real devices, was checked on transcripts, or is from documents.

`run_on_hardware` is a list of `what`, `chips`, `date`, `software`; `checked_on_transcripts` of `what`, `tool`, `chips`,
`files` of the plugin's `tests/smi`; `from_documents` of `what`, `chips`; `not_checked` of sentences.
"""

from __future__ import annotations

from functools import cache

from flagcore.domain.maturity import Claim, Maturity
from flagcore.vendorkit.fields import Part, read_file

FILE = "maturity.yaml"


@cache
def read_maturity(package: str) -> Maturity | None:
    """Return how well founded a plugin's facts are; None without a file. Raises SpecError for a bad file."""
    parts = read_file(package, FILE, "a maturity file")
    if parts is None:
        return None
    maturity = Maturity(
        run_on_hardware=tuple(_claim(part, "software", "date") for part in parts.each("run_on_hardware")),
        checked_on_transcripts=tuple(_claim(part, "tool") for part in parts.each("checked_on_transcripts")),
        from_documents=tuple(_claim(part) for part in parts.each("from_documents")),
        not_checked=tuple(parts.listed("not_checked", str)),
    )
    parts.finish()
    return maturity


def _claim(part: Part, *by: str) -> Claim:
    claim = Claim(
        what=part.required("what", str),
        chips=tuple(part.listed("chips", str)),
        by=", ".join(part.required(key, str) for key in by),
        files=tuple(part.listed("files", str)),
    )
    part.finish()
    return claim
