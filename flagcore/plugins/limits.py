"""Runs the code of plugins with a time limit, and without a way to end the process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, NoReturn, TypeVar

from flagcore.plugins.validation import BadPlugin

T = TypeVar("T")

HOOK_SECONDS = 60.0
"""The time limit of a hook. It is longer than those of the programs that the plugins of flagcore ask."""
SLOW_HOOK_SECONDS = 180.0
"""The time limit of a hook that may measure, or ask several programs one after the other."""
SAMPLE_SECONDS = 15.0
"""The time limit of one reading of a device, which a trial waits for."""


class TooSlow(BadPlugin):
    """The error for code of a plugin that does not end within its time limit."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return the result of `function`, or raise its exception. Raises BadPlugin if it tries to end the process.

    It runs in a thread of its own. If it does not end, the thread is abandoned, and does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="flagcore-plugin", daemon=True)
    with _no_exit():
        thread.start()
        thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TooSlow(f"did not end within {seconds:g} s; it is not asked again")
    return results[0]


@contextmanager
def _no_exit() -> Iterator[None]:
    """Replace `os._exit`, which would end the search without a word. Forked processes may use it."""
    own_process, end = os.getpid(), os._exit

    def refuse(code: int) -> NoReturn:
        if os.getpid() != own_process:
            end(code)
        raise BadPlugin(f"called os._exit({code})")

    replaceable: Any = os
    replaceable._exit = refuse
    try:
        yield
    finally:
        replaceable._exit = end
