"""What pages show without its being typed: outputs, layouts, formulas, each with what checks it.

Figures of a machine cannot be made again; the sentences and headings around them are compared with what a run of the
tests' own prints (tests/workshop.py), and what follows from other figures is computed anew. A check is called with the
block, in the workshop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from flagcore.cli.main import flag
from flagcore.cli.progress import line
from flagcore.contracts import Event
from flagcore.domain.candidate import Candidate
from flagcore.domain.plan import Counts
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.errors import RunError
from flagcore.report.text import funnel
from flagcore.spec.hostfile import read_hosts
from tests.pages import ROOT, Block

FIGURE = re.compile(r"[+-]?\d[\d,.]*%?")
COLUMNS = re.compile(r"-+")


def _columns(text: str) -> list[dict[str, str]]:
    """Return the rows of a table by its headings: the line of dashes says where columns are."""
    lines = text.splitlines()
    rule = next(place for place, each in enumerate(lines) if re.fullmatch(r"[- ]+", each))
    spans = [match.span() for match in COLUMNS.finditer(lines[rule])]
    heads = [lines[rule - 1][start:end].strip() for start, end in spans]
    rows = []
    for each in lines[rule + 1 :]:
        if not each.strip():
            break
        rows.append({head: each[start:end].strip() for head, (start, end) in zip(heads, spans, strict=True)})
    return rows


def _shape(text: str) -> str:
    """Return a line with its figures out and its candidates as one word."""
    known = re.sub(r": [A-Z]{2,3} \d.*$", ": CANDIDATE", text)
    return " ".join(FIGURE.sub("N", known).split())


def _share(text: str) -> float:
    return float(text.rstrip("%")) / 100


def result_of_a_run(block: Block) -> None:
    """The answer and the table: headings and sentences are those of a real run, gains follow from the speeds."""
    rows = _columns(block.text)
    own = Path("runs/own/report.txt").read_text()
    assert list(rows[0]) == list(_columns(own)[0])
    said = block.text.split("\n\n")[0]
    known = {_shape(each) for each in own.split("\n\n")[0].splitlines()}
    code = "\n".join((ROOT / "flagcore" / "report" / name).read_text() for name in ("text.py", "served.py"))
    for each in said.splitlines():
        assert _shape(each) in known or all(word in code for word in re.findall(r"[a-z]{4,}", each)), each
    baseline, best = (next(row for row in rows if row["trial"].endswith(name)) for name in ("baseline", "best"))
    for row in rows:
        told, steps = _share(row["vs base"]), float(baseline["step s"]) / float(row["step s"]) - 1
        assert told == pytest.approx(steps, abs=0.002)
    assert f"step {best['step s']} s" in said
    assert f"{best['tok/s/dev']} tokens/s/device" in said
    assert f"{best['vs base']} tokens/s against the baseline: {baseline['configuration']}" in said
    assert said.splitlines()[0].endswith(f": {best['configuration']}")
    for row in rows:
        assert row["state"] == TrialState(row["state"]).value


def what_was_learned(block: Block) -> None:
    """How far off predictions were: headings of a real run, shares that follow from the seconds."""
    own = Path("runs/own/report.txt").read_text().partition("Over ")[2]
    rows = _columns(block.text)
    heads = {re.sub("believed s", "believed", head) for head in rows[0]}
    assert heads == set(_columns(own)[0])
    for row in rows:
        step, *told = (float(row[name]) for name in list(row)[3:4] + list(row)[1:3])
        for seconds, share in zip(told, (row["off by"], row["after learning"]), strict=True):
            assert _share(share) == pytest.approx(step / seconds - 1, abs=0.001)
    for name, told in zip(("off by", "after learning"), re.findall(r" by ([\d.]+%)", block.text), strict=True):
        factors = sorted(max(1 + _share(row[name]), 1 / (1 + _share(row[name]))) - 1 for row in rows)
        assert factors[len(rows) // 2] == pytest.approx(_share(told), abs=0.001)


def books(block: Block) -> None:
    """Where the combinations went: made again from the same counts, it is the same text, and it balances."""
    rows = re.findall(r"^(.+?)  +(-?[\d,]+)$", block.text, re.MULTILINE)
    figures = {name.strip(): abs(int(number.replace(",", ""))) for name, number in rows}
    by_rule = {kind: {n.partition(": ")[2]: v for n, v in figures.items() if n.startswith(kind)} for kind in KINDS}
    counts = Counts(
        combinations=figures["combinations"],
        illegal=by_rule["illegal"],
        merged=figures["the same as another"],
        candidates=figures["candidates"],
        does_not_fit=figures["predicted not to fit"],
        pruned=by_rule["pruned"],
        measured=figures["measured"],
        stopped=figures["ended early as surely slower"],
        failed=figures["failed"],
        untried=figures["untried"],
    )
    assert counts.balanced
    text, _, ending = block.text.rstrip("\n").partition("\n\n")
    assert funnel(counts) == text
    assert ending.startswith("It ended because ")


KINDS = ("illegal", "pruned")


def sums(block: Block) -> None:
    """The two sums of the books, in the names of the code."""
    known = {each.name for each in fields(Counts)}
    assert set(re.findall(r"[a-z_]{4,}", block.text.replace("(by rule)", ""))) == known


def progress(block: Block) -> None:
    """Two lines of a trial, drawn again from what they say."""
    first, second = block.text.splitlines()
    named = re.search(r"starts: (.+), predicted ~([\d.]+) s$", first)
    timed = re.search(r"measured: ([\d.]+) s .*\[(\d+)/(\d+) trials, at most ~([\d.]+) min left", second)
    assert named
    assert timed
    knobs = {name: int(value) for name, value in re.findall(r"([A-Z]+) (\d+)", named[1])}
    names = {"TP": "tensor_model_parallel_size", "MBS": "micro_batch_size"}
    seconds = float(timed[1])
    measured = Measurement(step_times_s=(seconds,), step_time_s=seconds, spread_s=0.0, tokens_per_second_per_device=1.0)
    trial = Trial(
        number=1,
        candidate=Candidate(tuple((names[name], value) for name, value in knobs.items())),
        role=Role.SEARCH,
        state=TrialState.MEASURED,
        measurement=measured,
        predicted={"step_time_s": {"value": float(named[2])}},
    )
    starts = Event(
        kind="trial_started",
        trial=trial,
        trials_finished=int(timed[2]),
        trials_planned=int(timed[3]),
        seconds_left=60 * float(timed[4]),
        best=trial,
    )
    assert [line(starts), line(replace(starts, kind="trial_finished"))] == [first, second]


def floors(block: Block) -> None:
    """The floors of the architecture are the layers that import-linter holds, in their order."""
    (layers,) = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    held = [set(each.split(" | ")) for each in re.findall(r'"(.+?)"', layers)]
    joined = re.sub(r"   .*\n  (?=\| )", " ", block.text)  # a floor of two lines
    assert [set(re.split(r"   +", each)[0].strip().split(" | ")) for each in joined.splitlines()] == held


def folders(block: Block) -> None:
    """Each folder of a layout exists."""
    assert all((ROOT / each.split()[0]).is_dir() for each in block.text.splitlines())


def hostfile(block: Block) -> None:
    """A host file, read as one."""
    Path("hosts").write_text(block.text)
    names, slots = read_hosts(Path("hosts"), file="page")
    assert len(names) == len(block.text.splitlines())
    assert slots == 8


def refusal(block: Block) -> None:
    """What `flag tune` says of a run whose spec has changed."""
    changed = yaml.safe_load(Path("own.yaml").read_text())
    changed["auto_tuner"]["control"]["max_trials"] = 20
    Path("changed.yaml").write_text(yaml.safe_dump(changed))
    done = CliRunner().invoke(flag, ["tune", "changed.yaml", "--run-dir", "runs/own"])
    assert isinstance(done.exception, RunError)
    said = str(done.exception).replace("runs/own", "runs/train-cpu").replace(": 3 -> 20", ": 16 -> 20")
    assert f"flag: {said}\n" == block.text


def log_line(block: Block) -> None:
    """The line that the workshop's trials print, and which they were measured by."""
    assert block.text.strip("\n") in Path("runs/own/trials/0/stdout.log").read_text()


def generated(block: Block) -> None:
    """A synopsis: docs/site/cli_page.py writes it, and a test of the page compares it."""
    assert block.page == "docs/cli.md"


def left_to_readers(_block: Block) -> None:
    """A formula: its constants are in the tables of its page, which tests compare with the code."""


SHOWN: Mapping[tuple[str, str], Callable[[Block], None]] = {
    ("README.md", "Best on 2 x cpu"): result_of_a_run,
    ("docs/tutorial.md", "Best on 2 x cpu"): result_of_a_run,
    ("docs/index.md", "Best on 2 x cpu"): result_of_a_run,
    ("docs/tutorial.md", "Over 5 trials"): what_was_learned,
    ("docs/tutorial.md", "combinations"): books,
    ("docs/tutorial.md", "flag: runs/train-cpu belongs to another task"): refusal,
    ("docs/tutorial.md", " iteration"): log_line,
    ("docs/architecture.md", "cli "): floors,
    ("docs/architecture.md", "combinations ="): sums,
    ("docs/cli.md", "trial 1 (search) starts"): progress,
    ("docs/cli.md", "flag "): generated,
    ("docs/spec.md", "node-a slots=8"): hostfile,
    ("CONTRIBUTING.md", "flagcore/ "): folders,
    ("docs/physics.md", "static ="): left_to_readers,
    ("docs/physics.md", "seconds ="): left_to_readers,
    ("docs/search.md", "k(x, x') ="): left_to_readers,
}
"""The page and the first words of a block, and its check."""
