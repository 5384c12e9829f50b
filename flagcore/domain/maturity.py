"""Evidence for what a plugin states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement about some chips. `by` is a tool, or software with its date; `files` are transcripts."""

    what: str
    chips: tuple[str, ...]
    by: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Maturity:
    """What was run on real devices, checked on transcripts of others, or taken from documents."""

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
