"""Records the calls of a library's operators in this process, with shapes, formats and counts."""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flagcore_operators.arguments import Unsupported, encode, size, with_range
from flagcore_operators.contract import OperatorLibrary

SAVE_SECONDS = 1.0
"""How often calls are saved, because servers are ended by signals."""


class Recorder:
    """Counts equal calls, and saves them in `folder` in one file per process."""

    def __init__(self, library: OperatorLibrary, folder: str) -> None:
        self._library, self._folder = library, Path(folder)
        self._calls: dict[str, dict[str, Any]] = {}
        self._is_inside = self._is_saving = False

    def call(self, name: str, function: Callable[..., Any], arguments: Any, named: Any, *, whole: bool) -> Any:
        """Call a function, and record the call if it is one of an operator of the library.

        `whole`: whether calls inside of it are not recorded, and tensors may need gradients.
        """
        operator = "" if self._is_inside else self._library.operator(name, arguments)
        if operator:
            with suppress(Unsupported):
                self._note(operator, name, list(arguments), dict(named), whole)
        if not (operator and whole):
            return function(*arguments, **named)
        self._is_inside = True
        try:
            return function(*arguments, **named)
        finally:
            self._is_inside = False

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records its calls."""

        @wraps(function)
        def recorded(*arguments: Any, **named: Any) -> Any:
            return self.call(name, function, arguments, named, whole=True)

        return recorded

    def _note(self, operator: str, name: str, arguments: list[Any], named: dict[str, Any], whole: bool) -> None:
        values = [arguments, list(named.values())]
        encoded = encode(values, with_grad=whole and torch.is_grad_enabled())
        key = json.dumps([name, list(named), encoded])
        if key not in self._calls:
            ranges = with_range(encoded, values)
            self._calls[key] = {
                "operator": operator,
                "function": name,
                "arguments": ranges[0],
                "named": dict(zip(named, ranges[1], strict=True)),
                "implementations": list(self._library.implementations(operator)),
                "size": size(ranges),
                "count": 0,
            }
        self._calls[key]["count"] += 1
        if not self._is_saving:  # not earlier: ranks are forked from a process that may not have threads
            self._is_saving = True
            threading.Thread(target=self._save_often, daemon=True).start()

    def _save_often(self) -> None:
        while True:
            time.sleep(SAVE_SECONDS)
            self.save()

    def save(self) -> None:
        """Write the calls so far."""
        if self._calls:
            draft = self._folder / f"{os.getpid()}.draft{threading.get_ident()}"
            draft.write_text(json.dumps(list(self._calls.values())), encoding="utf-8")
            draft.replace(self._folder / f"{os.getpid()}.json")


class _Dispatch(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:  # its results are random, and cannot be compared
            return func(*args, **(kwargs or {}))
        return self._recorder.call(str(func), func, args, kwargs or {}, whole=False)


def record(library: OperatorLibrary, folder: str) -> None:
    """Record the calls of this thread, and of the processes that it forks, until the process ends."""
    recorder = Recorder(library, folder)
    library.record(recorder.wrapped)
    _Dispatch(recorder).__enter__()
    end = os._exit

    def save_and_exit(status: int) -> Any:
        recorder.save()
        end(status)

    os._exit = save_and_exit  # trial programs end with it
    atexit.register(recorder.save)
