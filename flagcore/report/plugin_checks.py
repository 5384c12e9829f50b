"""The results of the conformance checks as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from flagcore.i18n import _


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
    """Return one paragraph per plugin: counts, failures with a fix, and reasons of skipped checks."""
    return "\n\n".join("\n".join(_lines(plugin)) for plugin in checked)


def _lines(plugin: Checked) -> Iterator[str]:
    passed, failed, skipped = (len(plugin.of(state)) for state in ("passed", "failed", "skipped"))
    counts = _("{passed} passed, {failed} failed, {skipped} skipped", passed=passed, failed=failed, skipped=skipped)
    yield f"{plugin.name} {plugin.version}: {counts}"
    for each in plugin.of("failed"):
        yield "  " + _("failed: {check}", check=each["check"])
        yield f"    {each['message']}"
        yield "    " + _("fix: {fix}", fix=each["fix"])
    reasons: dict[str, list[str]] = {}
    for each in plugin.of("skipped"):
        reasons.setdefault(each["message"], []).append(each["check"])
    for reason, checks in reasons.items():
        more = " " + _("and {count} more", count=len(checks) - 1) if len(checks) > 1 else ""
        yield "  " + _("skipped: {checks}: {reason}", checks=checks[0] + more, reason=reason)
