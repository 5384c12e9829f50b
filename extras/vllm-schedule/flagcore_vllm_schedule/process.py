"""The program `inside.py` in the engine's own Python: it answers questions, in a process of its own."""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import psutil

INSIDE = Path(__file__).with_name("inside.py")
LIMIT_S = 60.0
"""The seconds of a question, with the import of the engine, and of a simulated load."""
WORKED_S = 1.0
"""The seconds of a processor after which a program works. It has twice LIMIT_S more, once: the machine may be busy."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


class Unanswered(Exception):
    """The program gave no answer: the release has another seam, or it was killed, or took too long."""


class Process:
    """A started program. It ends with this process, and after the seconds of a question. Raises Unanswered.

    `has_answered`: whether it has answered a question. `poll`: returns None while it runs.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        argv, variables = (python, str(INSIDE), str(os.getpid())), {**os.environ, **environment, **ENVIRONMENT}
        started: dict[str, Any] = {"env": variables, "text": True, "start_new_session": True}
        self._buffer, self._patience, self.has_answered = b"", True, False
        try:
            self._popen: Popen[str] = Popen(argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, **started)
        except OSError as error:
            raise Unanswered(f"{python} cannot be started: {error.strerror}") from None
        self.pid, self.poll = self._popen.pid, self._popen.poll

    def ask(self, question: Mapping[str, Any], end: float, seconds: Callable[[Any], float] = float) -> dict[str, Any]:
        """Return the answer to a question, by `end` (time.monotonic()). `seconds`: the time of a batch.

        Raises Unanswered, and then the process has ended, unless it said itself why there is no answer.
        """
        limit = ceil(max(end - time.monotonic(), 1.0) + 2.0 * LIMIT_S)
        try:
            print(json.dumps({**question, "limit": limit}), file=self._popen.stdin, flush=True)
            while "batch" in (answer := self._read(end)):
                print(json.dumps(seconds(answer["batch"])), file=self._popen.stdin, flush=True)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise Unanswered(str(error)) from None
            raise
        if "left" in answer:
            raise Unanswered(str(answer["left"]))
        self.has_answered = True
        return answer

    def _read(self, end: float) -> dict[str, Any]:
        """Return the next line. Raises OSError if it does not come by `end`, ValueError if it is not JSON."""
        assert self._popen.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._popen.stdout], [], [], max(end - time.monotonic(), 0.0))[0]:
                if not self._patience or sum(psutil.Process(self.pid).cpu_times()[:4]) < WORKED_S:
                    raise OSError(f"no answer within {LIMIT_S:.0f} s")
                end, self._patience = end + 2.0 * LIMIT_S, False
            elif piece := os.read(self._popen.stdout.fileno(), 1 << 16):
                self._buffer += piece
            else:
                raise OSError("its program has ended")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """Kill the program with its children."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(OSError, ValueError):
            self._popen.communicate()
        self._popen.wait()
