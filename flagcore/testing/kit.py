"""What a check is, and how checks are run. Needs no pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.plugins.installed import one_line
from flagcore.testing.subject import Problem, Skip, Subject, fix_of

MOST = 3
"""Problems of one check that its message lists; the others are counted."""

Problems = Iterator["str | Problem"]
Check = Callable[[Subject], Iterator[Problem]]
"""A check's name is a sentence that is true of a good plugin; it yields what makes it false, or raises Skip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one check ended: `state` is passed, failed or skipped. A skip has its reason as `message`."""

    check: str
    state: str
    message: str = ""
    fix: str = ""


def whole(plugin: Subject) -> Iterable[tuple[Any, ...]]:
    """Check the plugin as a whole."""
    return [(plugin,)]


def chips(plugin: Subject) -> Iterable[tuple[Chip]]:
    """Check each chip of the plugin. Raises Skip without any."""
    return [(chip,) for chip in plugin.own_chips()]


def check(
    fix: str = "", *, each: Callable[[Subject], Iterable[tuple[Any, ...]]] = whole
) -> Callable[[Callable[..., Problems]], Check]:
    """Make a check of a function that yields messages, which all have this `fix`, or problems with their own.

    The function is called for every item of `each(plugin)`, with the item's parts as arguments.
    """

    def decorate(function: Callable[..., Problems]) -> Check:
        @wraps(function)
        def checked(plugin: Subject) -> Iterator[Problem]:
            for arguments in each(plugin):
                for found in function(*arguments):
                    yield Problem(found, fix) if isinstance(found, str) else found

        return checked

    return decorate


def run(check: Check, subject: Subject) -> Result:
    """Return how `check` ends for `subject`. What the plugin raises meanwhile is a failure of the check."""
    name = check.__name__
    problems: list[Problem] = []
    try:
        for problem in check(subject):
            problems.append(problem)
    except Skip as skip:
        if not problems:
            return Result(check=name, state="skipped", message=str(skip))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = one_line(error)
        if isinstance(error, SpecError) and subject.is_reported(reason):
            return Result(check=name, state="skipped", message=f"{error.file or 'a file'} cannot be read")
        fix = fix_of(reason) or "the plugin raised this: correct it, or return None for what is unknown"
        return Result(check=name, state="failed", message=reason, fix=fix)
    if not problems:
        return Result(check=name, state="passed")
    messages = list(dict.fromkeys(problem.message for problem in problems))
    more = [f"and {len(messages) - MOST} more"] if len(messages) > MOST else []
    return Result(check=name, state="failed", message="; ".join([*messages[:MOST], *more]), fix=problems[0].fix)


def run_all(checks: Sequence[Check], subject: Subject) -> Iterator[Result]:
    """Yield the result of each check in turn; of a plugin that does not load only its module is checked."""
    for check in checks:
        if not subject.loaded.plugins and not check.__module__.endswith(".module"):
            yield Result(check=check.__name__, state="skipped", message="the plugin does not load")
        else:
            yield run(check, subject)
