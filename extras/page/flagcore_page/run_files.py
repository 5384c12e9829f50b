"""Reads the files of a run that its page shows: texts, and the ends of the logs of trials."""

from pathlib import Path

from flagcore.domain.files import read_regular
from flagcore.domain.trial import Trial
from flagcore.i18n import printable
from flagcore.report.run import RunData, tail, unreadable

MAX_FILE = 1 << 20
"""The maximum size of a file that is shown, in bytes."""


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
    folder, order = run.trial_folder(trial), {"stdout.log": 0, "stderr.log": 1}
    try:
        files = [*folder.glob("*.log"), *folder.glob("rank-*/*.log")]
    except OSError:
        return []
    files.sort(key=lambda file: (str(file.parent), order.get(file.name, 2), file.name))
    texts = [(str(file.relative_to(folder)), run.public_text(tail(file, run.folder))) for file in files]
    return [(name, text) for name, text in texts if text.strip()]
