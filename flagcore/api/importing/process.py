"""Read the command of a running process as a spec."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagcore import plugins
from flagcore.api.importing.command import ImportedCommand, imported
from flagcore.contracts import CommandReader, ImportNote
from flagcore.domain.secrets import REDACTED, is_secret, redact_arguments, redact_text
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _

PROC = Path("/proc")
SESSION = frozenset(
    (
        *("_", "COLORTERM", "COLUMNS", "DISPLAY", "EDITOR", "HISTFILE", "HOME", "HOSTNAME", "LANG", "LINES", "LOGNAME"),
        *("LS_COLORS", "MAIL", "OLDPWD", "PAGER", "PATH", "PS1", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
        *("VIRTUAL_ENV", "INVOCATION_ID", "JOURNAL_STREAM", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    )
)
_PYTHON = re.compile(r"python[\d.]*")
SESSION_PREFIXES = ("LC_", "SSH_", "XDG_", "DBUS_", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_")
"""Variables of a login session or of one rank, which are not part of a job."""


def read_process(
    pid: int, *, engine: str | None = None, model: str | None = None, chip: str | None = None
) -> ImportedCommand:
    """Return a spec for the running server or job with a process id; see `read_command`.

    Without `engine`, it is the one whose commands have the form of the process's. Environment variables that this shell
    does not have with the same value are taken. Secrets are left out, and named in notes. Raises SpecError, UsageError.
    """
    words, variables, directory = _process(pid)
    kept, notes = _taken(variables)
    shown = list(redact_arguments(words))
    problems = []
    for name in [engine] if engine else plugins.names(plugins.WORKLOADS):
        workload = plugins.workload(name)
        if not isinstance(workload, CommandReader):
            continue
        try:
            data, read = workload.read_command(shown, directory, model and os.path.abspath(model))
        except SpecError as error:
            problems.append(error)
            continue
        read = [*read, *(ImportNote(word, _("a secret: left out")) for word in shown if REDACTED in word), *notes]
        return imported(data, read, chip, kept)
    if engine and problems:
        raise problems[0]
    text = _("process {pid} runs no command that an engine can read: {command}; its children may")
    raise UsageError(text.format(pid=pid, command=" ".join(shown)[:200]))


def _process(pid: int) -> tuple[list[str], dict[str, str], Path]:
    """Return the arguments, the variables and the working directory of a process. Raises UsageError.

    The kernel starts a script with its interpreter: of `python /usr/bin/NAME`, NAME is the program.
    """
    folder = PROC / str(pid)
    try:
        words = _entries(folder / "cmdline")
        variables = dict(each.partition("=")[::2] for each in _entries(folder / "environ"))
        directory = Path(os.readlink(folder / "cwd"))
    except OSError as error:
        raise UsageError(_("process {pid} cannot be read: {reason}", pid=pid, reason=error.strerror)) from None
    if not words:
        raise UsageError(_("process {pid} has no command", pid=pid))
    is_script = len(words) > 1 and _PYTHON.fullmatch(os.path.basename(words[0])) and "/" in words[1]
    return words[1:] if is_script and not Path(words[1]).suffix else words, variables, directory


def _entries(file: Path) -> list[str]:
    return [each for each in file.read_bytes().decode("utf-8", "surrogateescape").split("\0") if each]


def _taken(variables: Mapping[str, str]) -> tuple[dict[str, str], Sequence[ImportNote]]:
    """Return the variables of a job, and notes on secrets among them."""
    kept, notes = {}, []
    for name, value in sorted(variables.items()):
        if name in SESSION or name.startswith(SESSION_PREFIXES) or os.environ.get(name) == value:
            continue
        if is_secret(name) or redact_text(f"{name}={value}") != f"{name}={value}":
            notes.append(ImportNote(name, _("a secret: left out")))
        elif value.isprintable() and name.isidentifier():
            kept[name] = value
    return kept, notes
