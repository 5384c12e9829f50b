"""The evidence for the data of a plugin."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement about chips. `by` is a tool, or software with its date; `files` are transcripts."""

    what: str
    chips: tuple[str, ...]
    by: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Maturity:
    """The claims of a plugin by their evidence: runs on hardware, transcripts of such runs, or documents."""

    run_on_hardware: tuple[Claim, ...] = ()
    checked_on_transcripts: tuple[Claim, ...] = ()
    from_documents: tuple[Claim, ...] = ()
    not_checked: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The strongest evidence in one word."""
        if self.run_on_hardware:
            return "hardware"
        return "transcripts" if self.checked_on_transcripts else "documents"
