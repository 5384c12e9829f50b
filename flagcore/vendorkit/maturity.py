"""Reads `maturity.yaml`: the parts of a plugin that ran on real devices, were checked on transcripts, or are from
documents.

`run_on_hardware` is a list of `what`, `chips`, `date`, `software`; `checked_on_transcripts` of `what`, `tool`, `chips`,
`files` of the plugin's `tests/smi`; `from_documents` of `what`, `chips`; `not_checked` of sentences.
"""

from __future__ import annotations

from functools import cache

from flagcore.domain.chip import Maturity
from flagcore.vendorkit.fields import build, entries, read_file

FILE = "maturity.yaml"
EVIDENCE = {"run_on_hardware": ("software", "date"), "checked_on_transcripts": ("tool",), "from_documents": ()}
"""The sections, with the keys that each claim must have in addition to `what`, `chips` and `files`."""


@cache
def read_maturity(package: str) -> Maturity | None:
    """Return the maturity of a plugin's data; None without a file. Raises SpecError for a bad file."""
    content, file = read_file(package, FILE), f"{package}/{FILE}"
    if content is None:
        return None
    for section, keys in EVIDENCE.items():
        claims = []
        for path, entry in entries(content, section, file):
            texts = [entry.pop(key, None) for key in keys]
            for key, value in zip(keys, texts, strict=True):
                build(str, value, file, f"{path}{key}")
            claims.append({**entry, "by": ", ".join(texts)})
        content[section] = claims
    maturity: Maturity = build(Maturity, content, file)
    return maturity
