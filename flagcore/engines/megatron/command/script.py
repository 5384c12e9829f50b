"""Finds what a shell script starts: bash runs the script, and `trace.bash` records and skips what does not compute."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flagcore.errors import SpecError
from flagcore.files import open_regular

SECONDS = 10.0
FIX = "give the torchrun command itself as train.command"
SHELLS = ("bash", "sh", "dash")
OWN_VARIABLES = ("BASH_ENV", "FLAGCORE_TRACE", "SHLVL", "PWD", "OLDPWD", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A command that a script would have run: its words, its folder, and the variables that the script set."""

    words: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]


def is_script(command: Sequence[str], directory: str | None) -> bool:
    """Return whether a command is a shell with a script, or a script of one."""
    return Path(command[0]).name in SHELLS or _names_shell(Path(directory or ".", command[0]))


def traced(command: Sequence[str], directory: str | None, variables: Mapping[str, str]) -> tuple[Recorded, ...]:
    """Return the commands that a script would run and that do more than compute, in order.

    `variables` are added to the environment. Raises SpecError if the script cannot be read.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise _refused(command, "is a script, and this machine has no bash to read it with")
    words = list(command[1:] if Path(command[0]).name in SHELLS else command)
    if not _names_file(words, directory):
        raise _refused(command, "names a script that does not exist")
    environment = {**os.environ, **variables}
    with tempfile.TemporaryDirectory(prefix="flagcore-trace-") as folder:
        own = {"BASH_ENV": str(Path(__file__).with_name("trace.bash")), "FLAGCORE_TRACE": folder}
        problem = _run([bash, *words], directory, {**environment, **own})
        files = sorted(Path(folder).iterdir(), key=lambda file: (file.stat().st_mtime_ns, file.name))
        records = [found for file in files if (found := _record(file, environment)) is not None]
    for kind, record in records:
        if kind == "block":
            where = record.words[0].replace(":", ", line ", 1)
            raise _refused(command, f"writes the output of a block to a file, which cannot be skipped: {where}")
    if problem and not records:
        raise _refused(command, f"cannot be read: {problem}")
    return tuple(record for _, record in records)


def _names_file(words: Sequence[str], directory: str | None) -> bool:
    for word in words:
        if word == "-c" or not word.startswith("-"):
            return word == "-c" or Path(directory or ".", word).is_file()
    return False


def _names_shell(file: Path) -> bool:
    with suppress(OSError), open_regular(file) as script:
        first = script.readline(200).decode("utf-8", errors="replace")
        return first.startswith("#!") and any(Path(word).name in SHELLS for word in first[2:].split())
    return False


def _run(argv: Sequence[str], directory: str | None, environment: Mapping[str, str]) -> str:
    """Run a traced script until all its processes end, and return why it ended badly, or nothing.

    Parts of a pipeline may outlive the script: a pipe that they inherit closes when the last one ends.
    """
    ends, inherited = os.pipe()
    kept = fcntl.fcntl(inherited, fcntl.F_DUPFD, 100)  # no number that scripts use
    os.close(inherited)
    with os.fdopen(ends), tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(kept,),
            )
        except OSError as error:
            return str(error.strerror or error)
        finally:
            os.close(kept)
        ended = select.select([ends], [], [], SECONDS)[0]
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == 0 or not ended:
            return "" if ended else f"it did not end in {SECONDS:g} s"
        output.seek(0)
        lines = output.read().decode("utf-8", errors="replace").strip().splitlines()
    return f"exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"


def _record(file: Path, before: Mapping[str, str]) -> tuple[str, Recorded] | None:
    """Return the kind of a record, and the record; None for one that a script without an end left unfinished."""
    text = file.read_bytes().decode("utf-8", errors="surrogateescape")
    if not text.endswith("\0"):
        return None
    kind, directory, count, *rest = text.split("\0")
    words, variables = tuple(rest[: int(count)]), _variables(rest[int(count) :])
    new = {name: value for name, value in variables if before.get(name) != value and name not in OWN_VARIABLES}
    return kind, Recorded(words=words, directory=directory, environment=new)


def _variables(entries: Iterable[str]) -> Iterable[tuple[str, str]]:
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals and not name.startswith("BASH_FUNC_"):
            yield name, value


def _refused(command: Sequence[str], problem: str) -> SpecError:
    return SpecError(key="train.command", value=" ".join(command), problem=problem, fix=FIX)
