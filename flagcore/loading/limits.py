"""Runs the code of plugins with a time limit, and without a way to end the process."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread, get_ident, main_thread
from typing import Any, TypeVar

T = TypeVar("T")

THREAD = "flagcore-plugin"
_OWN_PROCESS, _END = os.getpid(), os._exit

LOAD_SECONDS = 10.0
"""The time for which the import of an entry point may bring no new module. A cold network disk takes longer in all."""
MAX_WAITS = 6
"""The most times that an import may take LOAD_SECONDS."""
HOOK_SECONDS = 60.0
"""The time limit of a hook with the check of its answer, and of a method of that answer. It is longer than those of the
programs that flagcore's plugins ask."""
SLOW_HOOK_SECONDS = 180.0
"""The time limit of a hook that may measure, or ask several programs one after the other."""
SAMPLE_SECONDS = 15.0
"""The time limit of one reading of a device, which a trial waits for."""
MESSAGE_SECONDS = 1.0
"""The time limit of the message of an exception of a plugin."""
EXIT_SECONDS = 10.0
"""The time limit of threads that plugins leave, from the end of the command on."""


class BadPlugin(Exception):
    """The error of a plugin that does not implement the hooks correctly. `stage`: as in `PluginFailure`."""

    stage = "check"


class TooSlow(BadPlugin):
    """The error for code of a plugin that does not end within its time limit."""


_idle = list[SimpleQueue[Callable[[], object]]]()
"""The jobs of threads that wait for one. A new thread for each call costs more than most calls."""
os.register_at_fork(after_in_child=_idle.clear)


def within(seconds: float, function: Callable[[], T], progress: Callable[[], object] = lambda: None) -> T:
    """Return the result of `function`, or raise its exception. Raises BadPlugin if it tries to end the process.

    It has the same time again, up to MAX_WAITS times, if what `progress` returns has changed meanwhile. It runs in
    another thread, which is abandoned if it does not end: a loop of Python ends with SystemExit, and what waits in
    native code does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    threads: list[int] = []
    context, ended = copy_context(), SimpleQueue[None]()

    def run() -> None:
        threads.append(get_ident())
        try:
            results.append(context.run(function))
        except BaseException as error:  # Ctrl-C interrupts the main thread, never this one
            errors.append(BadPlugin("raised KeyboardInterrupt") if isinstance(error, KeyboardInterrupt) else error)
        ended.put(None)

    with _no_exit():
        jobs, seen = _worker(), progress()
        jobs.put(run)
        for _ in range(MAX_WAITS):
            with suppress(Empty):
                ended.get(timeout=seconds)
                _idle.append(jobs)
                break
            before, seen = seen, progress()
            if before == seen:
                break
    if errors:
        raise errors[0]
    if not results:
        for thread in threads:
            _end_loop(thread)
        raise TooSlow(f"did not end within {seconds:g} s; it is not asked again")
    return results[0]


def together(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of functions that end, each called in a thread of its own, or raise an exception of one."""
    results, errors, ended = dict[int, T](), list[BaseException](), SimpleQueue[None]()

    def run(place: int) -> None:
        try:
            results[place] = functions[place]()
        except BaseException as error:
            errors.append(error)
        ended.put(None)

    for place in range(len(functions)):
        Thread(target=copy_context().run, args=(run, place), name=THREAD, daemon=True).start()
    for _ in functions:
        ended.get()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(functions))]


def _worker() -> SimpleQueue[Callable[[], object]]:
    """Return the jobs of an idle or new thread."""
    with suppress(IndexError):
        return _idle.pop()
    jobs = SimpleQueue[Callable[[], object]]()

    def run() -> None:
        while True:
            jobs.get()()

    Thread(target=run, name=THREAD, daemon=True).start()
    return jobs


def _end_loop(thread: int) -> None:
    """Raise SystemExit in a thread, as soon as it runs code of Python.

    Until then CPython 3.11 hangs where a debugger traces code. The second exception, caught here, ends that.
    """
    import ctypes  # rarely needed

    with suppress(TooSlow):
        for each, error in ((thread, SystemExit), (get_ident(), TooSlow)):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(each), ctypes.py_object(error))


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
    """End a forked process. In this one, raise BadPlugin unless it is called in the main thread."""
    if os.getpid() == _OWN_PROCESS and current_thread() is not main_thread():
        raise BadPlugin(f"called os._exit({code})")
    _END(code)
