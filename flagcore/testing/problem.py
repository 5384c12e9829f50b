"""Results of a check: a problem, or a reason to skip. Needs no pytest."""

from __future__ import annotations

from dataclasses import dataclass


class Skip(Exception):
    """A check does not apply. The message says why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, with its place (file and key, or hook), and the fix."""

    message: str
    fix: str


def fix_of(reason: str) -> str:
    """Return the fix for an error of a plugin's file; empty for other errors."""
    if reason.startswith("SpecError"):
        return "correct that key; docs/write-a-plugin.md describes the files"
    missing = "write that file (see docs/write-a-plugin.md), or return None from the hook"
    return missing if reason.startswith("FileNotFoundError") else ""
