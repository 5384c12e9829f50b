"""A machine with fake management tools: executables that print a given output. The PATH contains nothing else."""

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flagcore_vendorkit import detection

from flagcore.contracts import Telemetry
from flagcore.domain.chip import Device
from flagcore.loading.entry_points import one_line
from flagcore.loading.limits import BadPlugin
from flagcore.plugins.validation import several
from flagcore_testing.kit import Subject, once
from flagcore_testing.package import Transcript

REAL_VARIABLES = ("FLAGCORE_CACHE", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
"""Variables of the real environment that the fake machine keeps."""

FOREIGN_TABLE = """\
+-----------------------------------------------------------------------------+
| NOBODY-SMI 1.0       Driver Version: 1.0       Runtime Version: 1.0          |
| GPU  Name                     | Bus-Id               | Clock-SM  Clock-Mem  |
| Fan  Temp  Perf  Pwr:Usage/Cap|      Memory-Usage    | GPU-Util  Compute M. |
|===============================+======================+======================|
| 0    Nobody N-100             | 00000000:13:00.0     | 1500MHz   1600MHz    |
| 0%   32C   P0    90W / 350W   | 116MiB / 32768MiB    | 0%        Default    |
+-----------------------------------------------------------------------------+
"""
"""The table of devices of a fictional vendor, in the usual form."""


@contextmanager
def machine(tools: Mapping[str, str] | None = None, **environment: str) -> Iterator[Path]:
    """Restrict the PATH to `tools` (name and shell script), and the environment to a few variables. Yield their folder.

    The previous environment is restored.
    """
    with tempfile.TemporaryDirectory(prefix="flagcore-check-") as made:
        folder = Path(made)
        (folder / "bin").mkdir()
        for name, script in (tools or {}).items():
            tool = folder / "bin" / name
            tool.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
            tool.chmod(0o755)
        real = {name: os.environ[name] for name in REAL_VARIABLES if name in os.environ}
        with quiet(), mock.patch.dict(os.environ, {**real, "PATH": str(folder / "bin"), **environment}, clear=True):
            yield folder


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress logging, because the checks cause errors on purpose."""
    level_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level_before)


@contextmanager
def warnings_enabled() -> Iterator[None]:
    """Enable the logging of warnings within `quiet`, without a handler that prints them."""
    before, handlers = logging.root.manager.disable, logging.root.handlers[:]
    logging.disable(logging.NOTSET)
    logging.root.handlers[:] = [logging.NullHandler()]
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.disable(before)


def prints(text: str) -> str:
    """Return a shell script that prints exactly `text`, whatever its arguments are."""
    return f"head -c {len(text.encode())} <<'END OF THE TRANSCRIPT'\n{text}\nEND OF THE TRANSCRIPT"


def printing(transcript: Transcript) -> dict[str, str]:
    """Return a mapping from the tool of a transcript to a script that prints the transcript."""
    cases = "".join(f"*{word}*)\n{prints(text)}\nexit 0;;\n" for word, text in transcript.others.items())
    script = f'case "$*" in\n{cases}esac\n' if cases else ""
    return {transcript.tool: f"{script}{prints(transcript.text)}"}


def devices(
    plugin: Subject, tools: Mapping[str, str] | None = None, when: str = "", /, **environment: str
) -> tuple[Device, ...]:
    """Return the devices that the plugin finds on a machine with `tools`.

    Raises the plugin's exceptions, or BadPlugin with the text `when`.
    """
    with machine(tools, **environment):
        try:
            return ask(plugin)
        except Exception as error:
            if when and not isinstance(error, NoLimit):
                raise BadPlugin(f"flagcore_devices raises {one_line(error)}, {when}") from error
            raise


@contextmanager
def uncached() -> Iterator[None]:
    """Let each reading run the tool, and so do later ones: transcripts are of different machines."""
    late = mock.patch.object(detection, "time", SimpleNamespace(monotonic=partial(float, 1e18)))
    with late, mock.patch.object(detection, "FRESH_SECONDS", -2e18):
        yield


def ask(plugin: Subject, **variables: str) -> tuple[Device, ...]:
    """Return the devices that the plugin finds on this machine if `variables` are added to the environment. Raises the
    plugin's exceptions, or BadPlugin."""
    answer = plugin.loaded.plugins[0].call("flagcore_devices", {"environment": {**os.environ, **variables}})
    return () if answer is None else several(Device)(answer)


@contextmanager
def readers(plugin: Subject, transcript: Transcript) -> Iterator[list[tuple[Device, Telemetry]]]:
    """Yield the devices in a transcript that have telemetry, each with its reader."""
    with machine(printing(transcript)), uncached():
        found = [(device, plugin.loaded.telemetry(device)) for device in ask(plugin)]
        yield [(device, reader) for device, reader in found if reader]


def samples(plugin: Subject, transcript: Transcript) -> list[tuple[Device, Mapping[str, float]]]:
    """Return the devices in a transcript that have telemetry, each with a reading of it."""
    with readers(plugin, transcript) as found:
        return [(device, reader.sample()) for device, reader in found]


@once
def without_tools(plugin: Subject) -> tuple[Device, ...]:
    """Return the devices found without any tool. There are none, except on a machine with the vendor's devices."""
    return devices(plugin)


@once
def tools_of(plugin: Subject) -> tuple[str, ...]:
    """Return the names of the programs that the plugin looks for, observed on a machine without programs."""
    started: list[str] = []
    start = subprocess.Popen.__init__

    def which(name: Any, *arguments: Any, **named: Any) -> None:
        started.append(os.path.basename(os.fsdecode(name)))

    def popen(self: Any, argv: Any, *arguments: Any, **named: Any) -> None:
        first = argv[0] if isinstance(argv, (list, tuple)) else str(argv).split()[0]
        started.append(os.path.basename(os.fsdecode(first)))
        start(self, argv, *arguments, **named)

    with (
        machine(),
        mock.patch.object(shutil, "which", which),
        mock.patch.object(subprocess.Popen, "__init__", popen),
        suppress(Exception),
    ):  # another check reports it
        ask(plugin)
    return tuple(name for name in dict.fromkeys(started) if not name.startswith("python"))


class NoLimit(Exception):
    """The plugin waited for a tool without a timeout."""


@contextmanager
def with_short_timeouts(waited: dict[int, float], seconds: float = 0.2) -> Iterator[None]:
    """Limit every wait for a process to `seconds`, store its original timeout in `waited`, and raise NoLimit for a wait
    without a timeout."""
    wait, communicate = subprocess.Popen.wait, subprocess.Popen.communicate

    def limit(process: Any, timeout: float | None) -> float | None:
        if process.poll() is not None or process.pid in waited:
            return timeout  # the process has ended, or its wait was given up and it was killed
        if timeout is None:
            process.kill()
            raise NoLimit
        waited[process.pid] = timeout
        return min(timeout, seconds)

    def short_wait(self: Any, timeout: float | None = None) -> int:
        return wait(self, limit(self, timeout))

    def short_communicate(self: Any, input: Any = None, timeout: float | None = None) -> Any:
        return communicate(self, input, limit(self, timeout))

    with (
        mock.patch.object(subprocess.Popen, "wait", short_wait),
        mock.patch.object(subprocess.Popen, "communicate", short_communicate),
    ):
        yield
