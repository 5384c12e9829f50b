"""Reads the files of a run that its page shows: texts, and the ends of the logs of trials."""

import os
from errno import ENOENT
from pathlib import Path

from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.trial import Trial
from flagcore.i18n import _, printable
from flagcore.report.run import RunData

MAX_FILE = 1 << 20
"""The maximum size of a file that is shown, in bytes."""
TAIL_LINES, TAIL_BYTES = 25, 4000
"""The maximum number of lines, and of bytes, that are shown from the end of a log."""


def text_of(run: RunData, file: Path) -> str:
    """Return the content of a text file without secrets and absolute paths.

    It is empty if the file is missing, and a line with the reason if the file cannot be read.
    """
    try:
        text = read_regular(file, MAX_FILE, run.folder).decode("utf-8", errors="replace")
    except OSError as error:
        text = unreadable(file, error)
    return run.public_text(printable(text))


def log_ends(run: RunData, trial: Trial) -> list[tuple[str, str]]:
    """Return the names and the ends of the logs of a trial and of its probed ranks.

    Empty logs are left out. Of a link to a file outside the run, the text says so.
    """
    folder, order = run.folder / "trials" / str(trial.number), {"stdout.log": 0, "stderr.log": 1}
    try:
        files = [*folder.glob("*.log"), *folder.glob("rank-*/*.log")]
    except OSError:
        return []
    files.sort(key=lambda file: (str(file.parent), order.get(file.name, 2), file.name))
    texts = [(str(file.relative_to(folder)), run.public_text(tail(file, run.folder))) for file in files]
    return [(name, text) for name, text in texts if text.strip()]


def tail(file: Path, folder: Path) -> str:
    """Return the last lines of a text file in the folder of a run, or why it cannot be read."""
    try:
        with open_regular(file, folder) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - TAIL_BYTES))
            text = log.read(TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        return unreadable(file, error)
    lines = text.splitlines()
    if size > TAIL_BYTES and len(lines) > 1:
        lines = lines[1:]
    return "\n".join(printable(line) for line in lines[-TAIL_LINES:])


def unreadable(file: Path, error: OSError) -> str:
    """Return a line that names a file that cannot be read. It is empty if the file is missing."""
    return "" if error.errno == ENOENT else "# " + _("{file} cannot be read ({why})", file=file, why=error.strerror)
