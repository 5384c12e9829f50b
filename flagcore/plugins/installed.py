"""Finds the entry points of installed distributions, and loads them.

Entry points are read anew each time, one distribution after the other. stevedore's list is not used, because its cache
may be stale for two minutes after an install, and because an unreadable distribution breaks the whole list.
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
    """A plugin that does not implement the hooks correctly. `stage` is that of its failure."""

    stage = "check"


class Clash(BadPlugin):
    """Several distributions have a plugin with the same name."""

    stage = "discover"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """The failure of a plugin or of one of its hooks.

    `stage` is discover, load, check, ask (a hook raised), answer (a hook returned an invalid result) or disable. `hook`
    is empty except for ask and answer.
    """

    name: str
    distribution: str = ""
    stage: str
    hook: str = ""
    reason: str

    def __str__(self) -> str:
        origin = f" ({self.distribution})" if self.distribution else ""
        return f"plugin {self.name}{origin}: {self.hook + ': ' if self.hook else ''}{self.reason}"


def installed(group: str, failures: list[PluginFailure] | None = None) -> dict[str, list[EntryPoint]]:
    """Return the entry points in `group` by name; a name with several entry points is a clash.

    Of distributions with the same name, the first on the path is used. Those that cannot be read are added to
    `failures`.
    """
    points: dict[str, list[EntryPoint]] = {}
    distribution_names = set()
    for distribution in distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue
            key = canonicalize_name(distribution.metadata["Name"])
            if key in distribution_names:
                continue
            distribution_names.add(key)
            for point in distribution.entry_points.select(group=group):
                points.setdefault(point.name, []).append(point)
        except Exception as error:
            path = str(getattr(distribution, "_path", "?"))
            if failures is not None:
                failures.append(PluginFailure(name=path, stage="discover", reason=one_line(error)))
    return points


def origin(point: EntryPoint) -> Distribution:
    """Return the distribution of an entry point."""
    assert point.dist is not None, "installed() reads entry points from distributions only"
    return point.dist


def origins(points: Iterable[EntryPoint]) -> str:
    """Return the names of the distributions of entry points."""
    return ", ".join(sorted(origin(point).metadata["Name"] for point in points))


def _incompatible(distribution: Distribution) -> str | None:
    """Return why `distribution` does not support this release of flagcore, by its `Requires-Dist`, or None."""
    own = [each for each in distribution.requires or () if each.lower().startswith("flagcore")]  # parsing takes long
    for requirement in map(Requirement, own):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) == "flagcore" and not requirement.specifier.contains(
            __version__, prereleases=True
        ):
            return f"needs {requirement}, but this is flagcore {__version__}; install a version for this release"
    return None


class _OneEntryPoint(NamedExtensionManager):  # type: ignore[misc]
    """A stevedore manager that loads a given entry point."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        super().__init__(point.group, [point.name], on_load_failure_callback=_reraise)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def load_only(points: Sequence[EntryPoint]) -> object:
    """Import the object of the only entry point with a name.

    Raises Clash if there are several, BadPlugin if it needs another release of flagcore, and exceptions of the import.
    """
    point, *others = points
    if others:
        raise Clash(f"several distributions have this name: {origins(points)}; uninstall all but one")
    if reason := _incompatible(origin(point)):
        raise BadPlugin(reason)
    with stdout_to_stderr():
        (extension,) = _OneEntryPoint(point)
    return extension.plugin


def _reraise(manager: Any, point: EntryPoint, error: Exception) -> NoReturn:
    raise error


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, also for native code, because stdout is reserved for results."""
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
    """Return the type and the message of `error` as one printable line."""
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
    """Collect the texts of warnings and errors that are logged in this context. They are also logged as usual."""
    texts: list[str] = []
    create_record = logging.getLogRecordFactory()

    def record_and_collect(*arguments: object, **named: object) -> logging.LogRecord:
        record = create_record(*arguments, **named)
        if record.levelno >= logging.WARNING:
            texts.append(record.getMessage())
        return record

    logging.setLogRecordFactory(record_and_collect)
    try:
        yield texts
    finally:
        logging.setLogRecordFactory(create_record)
