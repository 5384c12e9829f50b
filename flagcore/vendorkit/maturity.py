"""Reads `maturity.yaml`: what of a plugin was run on real devices, checked on transcripts, or taken from documents.

`run_on_hardware` is a list of `what`, `chips`, `date`, `software`; `checked_on_transcripts` of `what`, `tool`, `chips`,
`files` of the plugin's `tests/smi`; `from_documents` of `what`, `chips`; `not_checked` of sentences.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from flagcore.domain.maturity import Claim, Maturity
from flagcore.vendorkit.fields import Part, read_parts

FILE = "maturity.yaml"


@cache
def maturity(package: str) -> Maturity:
    """Return what a plugin says of itself. Raises SpecError for a bad file."""
    file = f"{package}/{FILE}"
    parts = read_parts(files(package).joinpath(FILE).read_text("utf-8"), file, "a maturity file")

    def claims(key: str, *by: str) -> tuple[Claim, ...]:
        listed = enumerate(parts.listed(key, dict))
        return tuple(_claim(Part(file, parts.kind, f"{key}[{place}].", entry), by) for place, entry in listed)

    made = Maturity(
        run_on_hardware=claims("run_on_hardware", "software", "date"),
        checked_on_transcripts=claims("checked_on_transcripts", "tool"),
        from_documents=claims("from_documents"),
        not_checked=tuple(parts.listed("not_checked", str)),
    )
    parts.finish()
    return made


def _claim(part: Part, by: tuple[str, ...]) -> Claim:
    made = Claim(
        what=part.required("what", str),
        chips=tuple(part.listed("chips", str)),
        by=", ".join(part.required(key, str) for key in by),
        files=tuple(part.listed("files", str)),
    )
    part.finish()
    return made
