"""Finds the entry points of installed distributions, and loads them one at a time with a time limit.

Entry points are read once for each state of the folders on the path, from one distribution after the other. The lists
of the standard library and of stevedore are not used, because one unreadable distribution breaks the whole list, and
stevedore's cache may be stale for two minutes after an install.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, TextIO, TypeVar, cast

from flagcore import __version__
from flagcore.errors import NoDevice
from flagcore.loading.limits import HOOK_SECONDS, LOAD_SECONDS, MESSAGE_SECONDS, BadPlugin, TooSlow, within

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """The failure of a plugin or of one of its hooks.

    `stage`: discover, load, check, ask (a hook raised an exception), answer (a hook returned an invalid result), or
    disable.
    `hook`: the name of the hook for ask and answer, else empty.
    """

    name: str
    distribution: str = ""
    stage: str
    hook: str = ""
    reason: str

    def __str__(self) -> str:
        origin = f" ({self.distribution})" if self.distribution else ""
        return f"plugin {self.name}{origin}: {self.hook + ': ' if self.hook else ''}{self.reason}"


class Clash(BadPlugin):
    """The error for several distributions that contain a plugin with the same name."""

    stage = "discover"


def installed(group: str, failures: list[PluginFailure] | None = None) -> dict[str, list[EntryPoint]]:
    """Return the entry points in `group` by name. A name with several entry points is a clash (see `load_only`).

    If several distributions have the same name, only the first one on the path is used. Distributions that cannot be
    read are added to `failures`.
    """
    points: dict[str, list[EntryPoint]] = {}
    seen = set()
    for distribution, found in _distributions(tuple((folder, changed_at(folder)) for folder in sys.path)):
        try:
            if found is None and group in (distribution.read_text("entry_points.txt") or ""):
                found = distribution.entry_points
            own = [point for point in found or () if point.group == group]
            if not own or (name := re.sub(r"[-_.]+", "-", name_of(distribution)).lower()) in seen:
                continue
            seen.add(name)
            for point in own:
                points.setdefault(point.name, []).append(point)
        except Exception as error:
            path = str(getattr(distribution, "_path", "?"))
            if failures is not None:
                failures.append(PluginFailure(name=path, stage="discover", reason=one_line(error)))
    return points


@lru_cache(maxsize=1)
def _distributions(path: tuple[tuple[str, int], ...]) -> list[tuple[Distribution, Sequence[EntryPoint] | None]]:
    """Return the distributions on the path with their entry points; None if these cannot be read.

    `path`: the folders on the path, and when each has changed.
    """
    found: list[tuple[Distribution, Sequence[EntryPoint] | None]] = []
    for distribution in distributions():
        points = None
        with suppress(Exception):
            points = distribution.entry_points
        if points is None or points:
            found.append((distribution, points))
    return found


def changed_at(path: str | os.PathLike[str]) -> int:
    """Return when a file or folder has changed, in nanoseconds; 0 if it cannot be read."""
    with suppress(OSError):
        return os.stat(path or ".").st_mtime_ns
    return 0


@lru_cache(maxsize=256)
def metadata_of(distribution: Distribution) -> Any:
    """Return the metadata of a distribution, which each access to its attributes parses again."""
    return distribution.metadata


def name_of(distribution: Distribution) -> str:
    """Return the name in the metadata of a distribution."""
    return cast(str, metadata_of(distribution)["Name"])


def origin(point: EntryPoint) -> Distribution:
    """Return the distribution that defines an entry point."""
    assert point.dist is not None, "installed() reads entry points from distributions only"
    return point.dist


def origins(points: Iterable[EntryPoint]) -> str:
    """Return the names of the distributions that define `points`, comma-separated."""
    return ", ".join(sorted(name_of(origin(point)) for point in points))


@lru_cache(maxsize=256)
def _incompatible(distribution: Distribution) -> str | None:
    """Return why `distribution` does not support this release of flagcore, or None. Reads its `Requires-Dist`."""
    requirements = map(
        _REQUIREMENT.fullmatch, metadata_of(distribution).get_all("Requires-Dist") or distribution.requires or ()
    )
    for found in (each for each in requirements if each and each["versions"] != _USUAL):  # packaging is slow
        if found["marker"] and not import_module("packaging.markers").Marker(found["marker"]).evaluate({"extra": ""}):
            continue
        if not import_module("packaging.specifiers").SpecifierSet(found["versions"] or "").contains(__version__, True):
            return f"needs {found[0]}, but this is flagcore {__version__}; install a version for this release"
    return None


_USUAL = re.sub(r"^(\d+)\.(\d+)\.\d+$", lambda own: f"<{own[1]}.{int(own[2]) + 1},>={own[1]}.{own[2]}", __version__)
_REQUIREMENT = re.compile(r"(?i)flagcore *(\[[^]]*\])? *\(?(?P<versions>[<>=!~][^;)]*)?\)? *(; *(?P<marker>.+))?")


def load_only(points: Sequence[EntryPoint], load: Callable[[EntryPoint], object] = EntryPoint.load) -> object:
    """Import the object of the only entry point in `points`, which all have the same name, with `load`.

    Raises Clash if there are several, BadPlugin if it needs another release of flagcore, prints without end, or its
    import does not end, and any exception of the import itself.
    """
    point, *others = points
    if (point, origin(point)) in _LOADED and not others and point.module in sys.modules:
        return point.load()
    if others:
        raise Clash(f"several distributions have this name: {origins(points)}; uninstall all but one")
    if reason := _incompatible(origin(point)):
        raise BadPlugin(reason)
    if point in _TOO_SLOW:
        raise _TOO_SLOW[point]
    try:
        with stdout_to_stderr(), redirect_stdout(cast(Any, sys.stderr and _Limited(sys.stderr))):
            found = within(LOAD_SECONDS, partial(load, point), lambda: len(sys.modules))
        _LOADED.add((point, origin(point)))
        return found
    except TooSlow as error:
        _TOO_SLOW[point] = error
        raise


_LOADED = set[tuple[EntryPoint, Distribution]]()  # these need no time limit again
_TOO_SLOW: dict[EntryPoint, TooSlow] = {}
"""The entry points whose import did not end, with the error. A further import would wait for it."""
_PRINTED_CHARACTERS = 100_000


class _Limited:
    """A text stream that raises BadPlugin after _PRINTED_CHARACTERS, so that a loop that prints ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, _PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            raise BadPlugin(f"printed more than {_PRINTED_CHARACTERS} characters while it was imported")
        return self._stream.write(text)

    close = staticmethod(lambda: None)  # messages need the stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def load_checked(kind: str, points: Sequence[EntryPoint], check: Callable[[Any], T], load: Any = load_only) -> T:
    """Return the object of the only entry point in `points`, after `check`, which raises BadPlugin for a wrong type.

    `kind`: the noun for messages. `load`: loads `points` as `load_only` does. Raises NoDevice, which names the entry
    point and its distribution, whatever the import does.
    """
    try:
        return within(HOOK_SECONDS, partial(check, load(points)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        name = points[0].name
        raise NoDevice(f"the {kind} {name} (from {origins(points)}) cannot be used: {one_line(error)}") from error


def instance_of(kind: type[T], found: object) -> T:
    """Return `found` if it is an object of the class `kind`. Raises BadPlugin."""
    if not isinstance(found, kind):
        raise BadPlugin(f"returned {short_repr(found)}, not a {kind.__name__}")
    return found


def subclass_of(base: type[T], found: object) -> type[T]:
    """Return `found` if it is a subclass of `base`. Raises BadPlugin."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise BadPlugin(f"returned {short_repr(found)}, not a subclass of {base.__name__}")
    return found


def of_group(group: str, found: object) -> None:
    """Raise BadPlugin if the class of `found` does not have this `group`, which another package declares."""
    if getattr(found, "group", "") != group:
        raise BadPlugin(f"returned {short_repr(found)}, which is not for {group}")


def with_methods(protocol: Any, found: Any) -> Any:
    """Return `found` if it has all methods of the Protocol or base class `protocol`. Raises BadPlugin."""
    members = {name: member for base in protocol.__mro__[:-1] for name, member in vars(base).items()}
    methods = [name for name, member in members.items() if not name.startswith("_") and callable(member)]
    if missing := [name for name in methods if not callable(getattr(found, name, None))]:
        raise BadPlugin(f"returned {short_repr(found)}, not a {protocol.__name__}: no method {', '.join(missing)}")
    return found


def short_repr(value: object) -> str:
    """Return the `repr` of a value as one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, including the output of native code, because stdout is reserved for results."""
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
        message = " ".join(within(MESSAGE_SECONDS, partial(str, error)).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = "".join(letter for letter in message if letter.isprintable())
    if isinstance(error, BadPlugin):
        return text[:limit]
    kind = type(error).__name__
    return f"{kind}: {text}"[:limit] if text else kind
