"""Reads the files of a run that its page shows: texts, and the ends of the logs of trials."""

from pathlib import Path

from flagcore.domain.files import read_regular
from flagcore.domain.trial import Trial
from flagcore.report.run import RunData, printable, tail

MAX_FILE = 1 << 20
"""The maximum size of a file that is shown, in bytes."""


def text_of(run: RunData, file: Path) -> str:
    """Return the content of a text file without secrets and absolute paths.

    It is empty if the file is missing or too large.
    """
    try:
        text = read_regular(file, MAX_FILE).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return run.public_text(printable(text))


def log_ends(run: RunData, trial: Trial) -> list[tuple[str, str]]:
    """Return the names and the ends of the logs of a trial and of its probed ranks.

    Empty logs, and links to files outside the folder, are left out.
    """
    folder, whole = run.trial_folder(trial), (run.folder / "trials").resolve()
    try:
        order = {"stdout.log": 0, "stderr.log": 1}
        files = [*folder.glob("*.log"), *folder.glob("rank-*/*.log")]
        files.sort(key=lambda file: (str(file.parent), order.get(file.name, 2), file.name))
        files = [file for file in files if file.resolve().is_relative_to(whole)]
    except (OSError, RuntimeError):
        return []
    texts = [(str(file.relative_to(folder)), run.public_text(tail(file))) for file in files]
    return [(name, text) for name, text in texts if text.strip()]
