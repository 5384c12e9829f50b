"""What is installed: the entry points of a group and where they come from, and how to load one of them safely.

Entry points are read each time, one distribution at a time: stevedore's own list comes from a cache file that can be
stale for two minutes after an install, and one unreadable distribution would cost all others. stevedore loads.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, NoReturn

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from stevedore.named import NamedExtensionManager

from flagcore import __version__


class BadPlugin(Exception):
    """A plugin that does not follow the hooks. The message has the reason."""


class Clash(BadPlugin):
    """Several distributions have a plugin of one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """The failure of one plugin, or of one of its answers.

    `stage` is discover, load, check, ask, answer or disable; `hook` is empty outside of ask and answer.
    """

    name: str
    distribution: str
    stage: str
    hook: str = ""
    reason: str

    def __str__(self) -> str:
        origin = f" ({self.distribution})" if self.distribution else ""
        return f"plugin {self.name}{origin}: {self.hook + ': ' if self.hook else ''}{self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The entry points of one group by name (more than one: a clash), and the distributions that cannot be read."""

    points: dict[str, list[EntryPoint]]
    skipped_files: tuple[PluginFailure, ...]


def installed(group: str) -> Installed:
    """Return the entry points in `group`. As in an import, the first distribution of a name on the path counts."""
    points: dict[str, list[EntryPoint]] = {}
    skipped, seen = [], set()
    for distribution in distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue
            key = canonicalize_name(distribution.metadata["Name"])
            if key in seen:
                continue
            seen.add(key)
            for point in distribution.entry_points.select(group=group):
                points.setdefault(point.name, []).append(point)
        except Exception as error:
            where = str(getattr(distribution, "_path", "?"))
            skipped.append(PluginFailure(name=where, distribution="", stage="discover", reason=one_line(error)))
    return Installed(points=points, skipped_files=tuple(skipped))


def origin(point: EntryPoint) -> Distribution:
    """Return the distribution that `point` comes from."""
    assert point.dist is not None, "installed() reads entry points from distributions only"
    return point.dist


def origins(points: Iterable[EntryPoint]) -> str:
    """Return the names of the distributions that the entry points come from."""
    return ", ".join(sorted(origin(point).metadata["Name"] for point in points))


def _incompatible(distribution: Distribution) -> str | None:
    """Return why `distribution` does not work with this flagcore, from its own `Requires-Dist`, or None."""
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) == "flagcore" and not requirement.specifier.contains(
            __version__, prereleases=True
        ):
            return f"needs {requirement}, but this is flagcore {__version__}; install a version made for it"
    return None


class _OneEntryPoint(NamedExtensionManager):  # type: ignore[misc]
    """stevedore's loader, given the one entry point that it may load."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        super().__init__(point.group, [point.name], on_load_failure_callback=_reraise)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def load_only(points: Sequence[EntryPoint]) -> object:
    """Import what the entry points of one name have, of which there may be only one.

    Raises Clash, BadPlugin for one that was made for another flagcore, and any exception of the import.
    """
    point, *others = points
    if others:
        raise Clash(f"several distributions have one of this name: {origins(points)}; uninstall all but one")
    if reason := _incompatible(origin(point)):
        raise BadPlugin(reason)
    with stdout_to_stderr():
        (extension,) = _OneEntryPoint(point)
    return extension.plugin


def _reraise(manager: Any, point: EntryPoint, error: Exception) -> NoReturn:
    raise error


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, also of native code: stdout carries only results."""
    copy = None
    with suppress(OSError, ValueError, AttributeError):  # stdout or stderr may be closed
        sys.stdout.flush()
        copy = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if copy is not None:
            os.dup2(copy, 1)
            os.close(copy)


def one_line(error: BaseException, limit: int = 400) -> str:
    """Return kind and message of `error` as one printable line."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = "".join(letter for letter in message if letter.isprintable())
    if isinstance(error, BadPlugin):
        return text[:limit]
    kind = type(error).__name__
    return f"{kind}: {text}"[:limit] if text else kind


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings and errors that are logged in this context; handlers still receive them."""
    texts: list[str] = []
    make = logging.getLogRecordFactory()

    def record_and_collect(*arguments: object, **named: object) -> logging.LogRecord:
        record = make(*arguments, **named)
        if record.levelno >= logging.WARNING:
            texts.append(record.getMessage())
        return record

    logging.setLogRecordFactory(record_and_collect)
    try:
        yield texts
    finally:
        logging.setLogRecordFactory(make)
