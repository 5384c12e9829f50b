"""Runs the scripts of `findings/`, or writes their table.

`python tools/findings.py run [SCRIPT ...]` runs all scripts, or those named, and prints which changed. With `table` it
writes `findings/README.md` from the comments at their tops, which begin with one sentence and have the fields of
`FIELDS`.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "findings"
FIELDS = ("Topic", "Package", "Expected", "Seen", "Hurts", "Date", "Output")
LIMIT_SECONDS = 1200
"""A script that takes longer is stopped. Each takes one to two minutes on a quiet machine, and ten on a busy one."""
INTRODUCTION = """# Findings

What other software really does, where its documentation or common sense says otherwise. Each script is run alone. It
installs pinned packages from PyPI in a temporary folder, runs them on valid input without flagcore, and fails if they
no longer do what its first lines show. `make findings` runs all and prints which changed. CI does not run them.

A finding needs Python 3.11 or later and, with torch, a download of the size of its build. [What engines really
do](../docs/engines-really.md) says what flagcore does about each. To add one, copy the form of another script, write
down what you expect before you run it, and run `python tools/findings.py table`.
"""


class Finding(NamedTuple):
    """A script, the sentence with which its comment begins, and the comment's fields by name."""

    name: str
    title: str
    fields: Mapping[str, str]


def findings(folder: Path = FOLDER) -> Iterator[Finding]:
    """Yield the findings in a folder, by name. Raises ValueError for a comment without one of the fields."""
    for path in sorted(folder.glob("*.sh")):
        comment = re.sub(r"(?m)^# ?", "", path.read_text("utf-8").partition("\n")[2].partition("\nset ")[0])
        title, *parts = re.split(rf"\n+({'|'.join(FIELDS)}): *", comment)
        fields = dict(zip(parts[::2], parts[1::2], strict=True))
        if tuple(fields) != FIELDS:
            raise ValueError(f"{path.name}: the comment must have the fields {', '.join(FIELDS)}, not {[*fields]}")
        yield Finding(path.name, one_line(title), fields)


def topic_of(finding: Finding) -> str:
    """Return the topic of a finding."""
    return finding.fields["Topic"]


def one_line(text: str) -> str:
    """Return text without line breaks."""
    return " ".join(text.split())


def table(found: Iterable[Finding]) -> str:
    """Return the page of the findings, by topic."""
    lines = [INTRODUCTION]
    for topic, group in groupby(sorted(found, key=topic_of), topic_of):
        lines += [f"## {topic}\n", "| finding | seen with | expected | who is hurt |", "| --- | --- | --- | --- |"]
        for each in group:
            cells = (one_line(each.fields[name]) for name in ("Package", "Expected", "Hurts"))
            lines.append(f"| [{each.title}]({each.name}) | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def run(path: Path) -> str:
    """Run a script. Return an empty text, or why it failed: the last line of its errors."""
    process = subprocess.Popen(["sh", path], stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    try:
        errors = process.communicate(timeout=LIMIT_SECONDS)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # also pip; the script removes its folder
        process.communicate()
        return f"took longer than {LIMIT_SECONDS} s"
    return (errors.strip().rpartition("\n")[2] or f"exit {process.returncode}") if process.returncode else ""


def main() -> int:
    """Run the findings or write their table. Return 1 if one changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["run", "table"])
    parser.add_argument("scripts", nargs="*", type=Path)
    options = parser.parse_args()
    if options.task == "table":
        (FOLDER / "README.md").write_text(table(findings()), encoding="utf-8")
        return 0
    changed = 0
    for path in options.scripts or sorted(FOLDER.glob("*.sh")):
        start = time.monotonic()
        reason = run(path)
        changed += bool(reason)
        took = f"{time.monotonic() - start:.0f} s"
        print(f"{'changed' if reason else 'same':8}{path.name} ({took}) {reason}".rstrip(), flush=True)
    return changed > 0


if __name__ == "__main__":
    sys.exit(main())
