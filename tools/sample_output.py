"""Replace the sample outputs of README and docs by the result of a run: `python tools/sample_output.py runs/train-cpu`.

Run it after `make tune` on a quiet machine. Pages in English and Chinese have the same blocks.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "README.zh.md", "docs/tutorial.md", "docs/tutorial.zh.md", "docs/index.md", "docs/report.md")
SHORT = ("docs/index.md",)
"""Pages whose table has only the baseline and the best."""
HEADLINE = ("README.md",)
"""Pages that have only the first lines."""


def sample(report: str, *, is_short: bool) -> str:
    """Return the answer and the table of trials of a report.txt."""
    answer, table = re.split(r"\n(?=trial +configuration)", report, maxsplit=1)
    heading, rule, *rows = table.split("\n\n")[0].splitlines()
    shown = [row for row in rows if not is_short or re.match(r"\d+ (baseline|best)", row)]
    return "\n".join([answer, heading, rule, *shown, ""])


def main(run: Path) -> None:
    """Write the pages."""
    report = (run / "report.txt").read_text(encoding="utf-8")
    for name in PAGES:
        file, text = ROOT / name, sample(report, is_short=name in SHORT)
        block = re.compile(r"(?<=^```text\n)Best on .*?(?=^```$)", re.DOTALL | re.MULTILINE)
        counts = re.compile(r"(?<=^```text\n)combinations .*?(?=^```$)", re.DOTALL | re.MULTILINE)
        if name in HEADLINE:
            text = text.split("\n\n")[0] + "\n"
        page = block.sub(lambda _: text, file.read_text(encoding="utf-8"))  # noqa: B023
        file.write_text(counts.sub(lambda _: report[report.index("\ncombinations ") + 1 :], page), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
