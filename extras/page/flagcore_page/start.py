"""Blocks of the summary that only a page has: how the best is started, and a chart of the fastest configurations.

Also reads the files of a run that the page shows: texts, and the ends of the logs of trials.
"""

import os
import shlex
from collections.abc import Iterator
from errno import ENOENT
from pathlib import Path
from typing import Any

from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.trial import ESTIMATE, Trial
from flagcore.i18n import _, ngettext, printable
from flagcore.report.blocks import Text, percent, table
from flagcore.report.formats import NAMES
from flagcore.report.run import RunData, json_file
from flagcore_page.blocks import BASELINE, BEST, OTHER, Bar, Bars, Block, Chart, Code, Collapsed

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


MAX_BARS = 10
"""The maximum number of configurations, including the best and the baseline."""


def commands(run: RunData, best: Trial) -> Iterator[Block]:
    """Yield one command of the best configuration to copy, and folded its flags and its script."""
    script, launch = text_of(run, run.folder / "best.sh"), json_file(run.folder, "best/launch.json")
    flags, command = _flags(run, best), run.start
    caption = _("Command that writes the start script")
    if script and launch.get("missing"):
        caption = _("Start command, for you to complete: add {missing}", missing=launch["missing"])
        command = shlex.join(["bash", f"{run.folder_name}/best.sh"])
    elif script:
        caption = _("Start command")
        caption = _("Start command, to be run in the folder of the run") if run.folder_name == "." else caption
        command = shlex.join(["flag", "run", run.folder_name])
    elif reason := launch.get("cannot"):
        yield Text(_("It cannot be started from here: {reason}", reason=run.public_text(str(reason))))
    choices = [Code(caption, command, copied=True)] if command else []
    choices += [Code(_("Flags of the engine"), shlex.join(flags), copied=True)] if flags else []
    choices += [Code(_("Start script without flagcore (best.sh)"), script)] if script else []
    yield from choices[:1]
    for number, each in enumerate(choices[1:]):
        yield Collapsed(f"command-{number}", each.caption, (each,))


def _flags(run: RunData, best: Trial) -> list[str]:
    """Return the flags of the engine that set the knobs of the best. It is empty if flags cannot set all of them."""
    flags: list[str] = []
    for name, value in best.candidate.items:
        if knob := run.knobs.get(name):
            effect = knob.effect(value)
            flags += [*knob.arguments(value), *(effect.flags if effect else ())]
            is_default = value is None or value == knob.neutral
            if not (knob.flags or effect or knob.layout or knob.kind == "flag" or is_default):
                return []
    return flags


def configurations(run: RunData) -> Chart | None:
    """Return a chart with a bar for each of the fastest configurations, the fastest first. None for fewer than two."""
    best = run.best
    if best is None:
        return None
    kinds = {each.candidate: kind for kind, each in ((BASELINE, run.baseline), (BEST, best)) if each}
    known = [(trial, figures) for trial in run.trials if (figures := run.figures(trial))]
    known.sort(key=lambda pair: (-pair[1][0] if run.is_rate else pair[1][0], pair[0].candidate != best.candidate))
    named = {trial.candidate: trial.number for trial, _figures in known if trial.candidate in kinds}
    others = [trial.number for trial, _figures in known if trial.candidate not in named]
    chosen = {*named.values(), *others[: MAX_BARS - len(named)]}
    rows, bars = list[list[Any]](), list[Bar]()
    of_best = run.figures(best)
    for trial, figures in (each for each in known if each[0].number in chosen):
        name, values = run.name(trial), run.configuration(trial)
        bars.append(Bar(f"{name}: {values}{run.over(trial)}", kinds.get(trial.candidate, OTHER), *figures))
        rows.append(
            [run.cell(trial), values, *figures, of_best and percent(figures[0] / of_best[0] - 1.0, signed=True)]
        )
    if len(bars) < 2:
        return None
    total = run.counts.candidates if run.fidelity == ESTIMATE else len(run.trials)
    summary = [_("{count} of {total:,} configurations, the fastest first.", count=len(bars), total=total)]
    if missing := len(run.trials) - len(known):
        summary.append(ngettext("{count} has no measurement.", "{count} have no measurement.", missing))
    if run.fidelity == ESTIMATE:
        summary.append(_("Lines are 80% intervals of the predictions."))
    else:
        summary.append(_("Each line shows the range over the runs of a configuration.") if run.repeats else "")
    title = _("The fastest configurations")
    headings = [_(NAMES["row"][run.fidelity]), _("configuration"), run.unit, _("lowest"), _("highest")]
    headings += [_("vs recommended") if run.fidelity == ESTIMATE else _("vs best")]
    data = table(title, headings, rows)
    return Chart(title=title, summary=" ".join(summary), drawing=Bars(run.unit, bars), tables=[data])
