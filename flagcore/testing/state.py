"""Global state of a process, which a plugin must not change on import or in a hook."""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping

import numpy as np


def process_state() -> dict[str, object]:
    """Return the state by its name in messages. The values are only for comparisons."""
    return {what: read() for what, read in PARTS.items()}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of changed parts of the state, with the names of changed environment variables."""
    changed_names = [what for what in before if before[what] != after[what]]
    return [
        f"{what} ({_names(before[what], after[what])})" if what == "environment" else what for what in changed_names
    ]


def _names(before: object, after: object) -> str:
    first, second = (each if isinstance(each, dict) else {} for each in (before, after))
    return ", ".join(sorted(name for name in {*first, *second} if first.get(name) != second.get(name)))


def _logging() -> object:
    root, known = logging.root, logging.root.manager.loggerDict
    flagcore_logger = known.get("flagcore")
    handlers = flagcore_logger.handlers if isinstance(flagcore_logger, logging.Logger) else []
    return root.level, tuple(map(id, root.handlers)), tuple(map(id, handlers)), root.manager.disable


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _signals() -> object:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _numpy_random() -> object:
    name, keys, *other_state = np.random.get_state(legacy=True)
    return name, bytes(np.asarray(keys)), tuple(other_state)


PARTS: Mapping[str, Callable[[], object]] = {
    "environment": lambda: dict(os.environ),
    "working directory": os.getcwd,
    "import path": lambda: list(sys.path),
    "logging of the program": _logging,
    "filters of warnings": lambda: [str(each) for each in warnings.filters],
    "error handling of numpy": np.geterr,
    "printing of numpy": lambda: str(np.get_printoptions()),
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "signal handlers": _signals,
    "hooks of exceptions": lambda: (sys.excepthook, threading.excepthook),
    "random numbers of random": random.getstate,
    "random numbers of numpy": _numpy_random,
    "time limit of sockets": socket.getdefaulttimeout,
    "mode of new files": _umask,
    "limit of recursion": sys.getrecursionlimit,
    "CPU affinity of the process": lambda: sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
    "garbage collector": gc.isenabled,
    "builtins": lambda: sorted(set(vars(builtins)) - {"_"}),
}
