"""What a check of a plugin says: what is wrong, or why there is nothing to look at. Needs no pytest."""

from __future__ import annotations

from dataclasses import dataclass


class Skip(Exception):
    """A check has nothing to look at. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong, with its place (file and key, or hook), and what to do about it."""

    message: str
    fix: str


def fix_of(reason: str) -> str:
    """Return what to do about what a plugin's files raised; nothing for what is no file's fault."""
    if reason.startswith("SpecError"):
        return "mend that key of the file; docs/write-a-plugin.md tells what each file holds"
    missing = "write that file (docs/write-a-plugin.md tells what it holds), or let the hook answer None"
    return missing if reason.startswith("FileNotFoundError") else ""
