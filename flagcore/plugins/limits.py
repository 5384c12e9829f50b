"""Runs the code of plugins with a time limit, and without a way to end the process."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

from flagcore.plugins.validation import BadPlugin

T = TypeVar("T")

THREAD = "flagcore-plugin"
_OWN_PROCESS, _END = os.getpid(), os._exit

HOOK_SECONDS = 60.0
"""The time limit of a hook and of an import. It is longer than those of the programs that flagcore's plugins ask."""
SLOW_HOOK_SECONDS = 180.0
"""The time limit of a hook that may measure, or ask several programs one after the other."""
SAMPLE_SECONDS = 15.0
"""The time limit of one reading of a device, which a trial waits for."""
EXIT_SECONDS = 10.0
"""The time limit of threads that plugins leave, from the end of the command on."""


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

    thread = Thread(target=run, name=THREAD, daemon=True)
    with _no_exit():
        thread.start()
        thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TooSlow(f"did not end within {seconds:g} s; it is not asked again")
    return results[0]


def end_despite_threads(status: int) -> None:
    """End the process with `status` after EXIT_SECONDS, if other threads keep it alive until then."""

    def end() -> None:
        time.sleep(EXIT_SECONDS)
        _END(status)

    Thread(target=end, daemon=True).start()


_LOCK = Lock()
_running = 0
"""The number of threads that run code of plugins. Several trials may read their devices at once."""


@contextmanager
def _no_exit() -> Iterator[None]:
    """Replace `os._exit`, which would end the search without a word, while code of plugins runs."""
    global _running
    replaceable: Any = os
    with _LOCK:
        _running += 1
        replaceable._exit = _refuse
    try:
        yield
    finally:
        with _LOCK:
            _running -= 1
            replaceable._exit = _refuse if _running else _END


def _refuse(code: int) -> None:
    """End a forked process, and this one in other threads than those of plugins, for which it raises BadPlugin."""
    if os.getpid() == _OWN_PROCESS and current_thread().name == THREAD:
        raise BadPlugin(f"called os._exit({code})")
    _END(code)
