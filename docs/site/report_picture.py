"""The picture docs/report.svg: the summary of a report, drawn from the sample output of README.md."""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "report.svg"
WIDTH, BAR = 860, 400
BLUE, GREY, TEXT = "#3f51b5", "#9fa8da", "#24292f"


def picture() -> str:
    """Return the picture of the sample run: the best, its speedup, and a bar for each trial."""
    sample = (ROOT / "README.md").read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    best = re.findall(r"^Best on (.*)$", sample, re.MULTILINE)[0]
    speedup = re.findall(r"Speedup over the baseline: (\S+) tokens/s (\(.*?\)) over (.*)$", sample, re.MULTILINE)[0]
    rows = [re.split(r" {2,}", line) for line in sample.split("----\n")[-1].splitlines() if line]
    trials = [(number, name, float(rate)) for number, name, _, _, _, _, rate, *_ in rows]
    return "\n".join([*_frame(64 + 172 + 30 * len(trials)), *_summary(best, *speedup), *_bars(trials), "</svg>", ""])


def _frame(height: int) -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    yield '     aria-labelledby="title desc" font-family="Helvetica, Arial, sans-serif">'
    yield '  <title id="title">A report of flagcore</title>'
    yield '  <desc id="desc">The best configuration, its speedup over the baseline, and the speed of each trial.</desc>'
    yield f'  <rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" fill="#fff" stroke="#d0d7de"/>'


def _summary(best: str, gain: str, rounds: str, baseline: str) -> Iterator[str]:
    machine, _, name = best.partition(": ")
    yield _text(32, 44, f"Best on {machine}", 16, "#57606a")
    yield _text(32, 84, name, 30, TEXT, weight="bold")
    yield _text(32, 128, f"{gain} tokens/s", 24, BLUE, weight="bold")
    yield _text(32, 154, f"over {baseline} {rounds}", 14, "#57606a")
    yield _text(32, 206, "Tokens per second and device", 15, TEXT, weight="bold")


def _bars(trials: list[tuple[str, str, float]]) -> Iterator[str]:
    scale = BAR / max(rate for *_, rate in trials)
    for place, (number, name, rate) in enumerate(trials):
        y = 224 + 30 * place
        color = BLUE if "best" in number else GREY
        yield _text(32, y + 15, f"{number}", 13, "#57606a")
        yield _text(140, y + 15, name, 13, TEXT)
        yield f'  <rect x="340" y="{y}" width="{scale * rate:.1f}" height="20" rx="3" fill="{color}"/>'
        yield _text(round(348 + scale * rate), y + 15, f"{rate:g}", 13, TEXT)


def _text(x: int, y: int, text: str, size: int, color: str, weight: str = "normal") -> str:
    start = f'  <text x="{x}" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}">'
    return f"{start}{escape(text)}</text>"
