"""The local launcher starts a trial on this machine, under a guard process."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, BinaryIO

from flagcore.contracts import Launcher
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.secrets import redact_arguments, redact_data
from flagcore.errors import LaunchError
from flagcore.launchers import guard, guarded, network
from flagcore.launchers.guarded import Guarded, Limits
from flagcore.launchers.template import Template, Templates


class LocalRunning:
    """A trial on this machine. `pid` is the id of its first process, which leads its session and process group."""

    def __init__(self, running: Guarded, template: Template | None = None) -> None:
        self._running, self._template, self.pid = running, template, running.pid

    def wait(self, seconds: float) -> Exit | None:
        verdict = self._running.wait(seconds)
        return None if verdict is None else self._exit(verdict)

    def stop(self) -> Exit:
        return self._exit(self._running.stop())

    def _exit(self, verdict: Mapping[str, Any]) -> Exit:
        """Return the exit record of the trial. If the trial failed, its template is closed."""
        exit_record = Exit(**verdict, warm=self._template is not None)
        if self._template and exit_record.ended_by != "request" and (exit_record.code or exit_record.ended_by):
            self._template.close()
        return exit_record


class LocalLauncher(Launcher):
    """Starts trials on this machine, which may run in parallel.

    A trial with `Launch.warm` is forked from a `Template` if that is idle. The template is kept for trials with the
    same program, environment, cores and control group, until one of them fails.
    """

    name = "local"

    def __init__(self) -> None:
        self._templates = Templates()

    def start(self, launch: Launch) -> LocalRunning:
        """Start `launch` in a new session.

        The trial gets flagcore's environment, updated with `launch.environment`. MASTER_ADDR and a free MASTER_PORT are
        added unless they are set. `launch.json` records the launch without secrets, `exit.json` its end. Raises
        LaunchError if the trial cannot be started.
        """
        environment = {"MASTER_ADDR": "127.0.0.1", **network.fill(launch.environment, network.placeholders())}
        if "MASTER_PORT" not in environment:
            with as_launch_error("no free TCP port on 127.0.0.1: set MASTER_PORT in the trial's environment; "):
                environment["MASTER_PORT"] = str(network.free_port("127.0.0.1"))
        places = {f"{{{name.lower()}}}": environment[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        places |= {"{node_rank}": "0", "{nnodes}": "1"}
        launch = replace(launch, argv=tuple(network.replaced(word, places) for word in launch.argv))
        folder = os.path.abspath(launch.folder)
        directory = os.path.abspath(launch.directory or folder)
        with contextlib.ExitStack() as logs:
            with as_launch_error(f"cannot write into the trial's folder {folder}: "):
                prepare(launch, environment, folder, directory)
                stdout, stderr = (logs.enter_context(_new_log(folder, name)) for name in ("stdout.log", "stderr.log"))
            template = self._templates.find(launch.argv, environment, directory) if launch.warm else None
            limits = Limits(launch.timeout_seconds, launch.memory_limit_bytes, launch.disk_limit_bytes)
            begin = partial(guarded.start, launch.argv, environment, directory, folder, limits)
            with as_launch_error():
                return LocalRunning(*self._templates.start(template, begin, stdout, stderr))

    def close(self) -> None:
        """End the template, unless a trial runs."""
        self._templates.close()


LAUNCHER: Launcher = LocalLauncher()


def start_for_users(launch: Launch, stdout: int, stderr: int) -> LocalRunning:
    """Start `launch` without limits and files. The program writes to the two descriptors, and ends with this process.

    Raises LaunchError if the program cannot be started.
    """
    directory = os.path.abspath(launch.directory or launch.folder)
    spawn = partial(guarded.spawn_guard, stdout, stderr)
    with as_launch_error():
        return LocalRunning(guarded.start(launch.argv, launch.environment, directory, spawn=spawn))


@contextlib.contextmanager
def as_launch_error(prefix: str = "") -> Iterator[None]:
    """Convert an OSError in this context to a LaunchError, whose message begins with `prefix`."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{prefix}{error}") from error


def _new_log(folder: str, name: str) -> BinaryIO:
    """Create an empty log file that only its owner can read, because programs may print secrets.

    An existing file is removed first, because opening a named pipe would block.
    """
    path = os.path.join(folder, name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def prepare(launch: Launch, environment: Mapping[str, str], folder: str, directory: str) -> None:
    """Create the folder of a trial and write its `launch.json`. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    free_bytes = guard.free_disk_bytes(folder)
    if free_bytes < guard.FREE_DISK_FLOOR_BYTES:
        raise OSError(
            f"only {free_bytes >> 20} MiB of disk are left, {guard.FREE_DISK_FLOOR_BYTES >> 20} MiB are needed"
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "exit.json"))
    record = {
        "argv": list(redact_arguments(launch.argv)),
        "environment": redact_data(environment),
        "directory": directory,
        "timeout_seconds": launch.timeout_seconds,
        "timeout_because": launch.timeout_because,
        "memory_limit_bytes": launch.memory_limit_bytes,
        "disk_limit_bytes": launch.disk_limit_bytes,
        "started_at": datetime.now(timezone.utc).isoformat(),
    }
    if launch.hosts:
        record["hosts"] = list(launch.hosts)
    if launch.on_host:
        record["on_host"] = {
            host: {"argv": list(redact_arguments(each.argv)), "environment": redact_data(each.environment)}
            for host, each in launch.on_host.items()
        }
    guard.write_json(os.path.join(folder, "launch.json"), record)
