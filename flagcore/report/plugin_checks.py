"""What the conformance kit found, as text: counts of each plugin, failures with what to do, and why others skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Checked(Protocol):
    """A plugin with the result of each check."""

    @property
    def name(self) -> str:
        """The plugin's name."""

    @property
    def version(self) -> str:
        """Its distribution's version."""

    def of(self, state: str) -> list[dict[str, str]]:
        """Return the results of one state: passed, failed or skipped."""


def as_text(checked: Sequence[Checked]) -> str:
    """Return a paragraph a plugin."""
    return "\n\n".join("\n".join(_lines(plugin)) for plugin in checked)


def _lines(plugin: Checked) -> Iterator[str]:
    counts = ", ".join(f"{len(plugin.of(state))} {state}" for state in ("passed", "failed", "skipped"))
    yield f"{plugin.name} {plugin.version}: {counts}"
    for failed in plugin.of("failed"):
        yield f"  failed: {failed['check']}"
        yield f"    {failed['message']}"
        yield f"    to mend it: {failed['fix']}"
    reasons: dict[str, list[str]] = {}
    for skipped in plugin.of("skipped"):
        reasons.setdefault(skipped["message"], []).append(skipped["check"])
    for reason, checks in reasons.items():
        yield f"  skipped: {checks[0]}{f' and {len(checks) - 1} more' if len(checks) > 1 else ''}: {reason}"
