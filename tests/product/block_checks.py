"""The pages as the tests read them, with the fenced blocks that people wrote, and checks of blocks that are neither
commands nor code: outputs, layouts, formulas.

Measured figures cannot be reproduced; the text around them is compared with the output of a run of
tests/product/example_folder.py. Derived figures are computed again. A check runs in the example folder and receives
the block.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from flagcore_kubernetes.pods import pod_options
from flagcore_training.knobs import knob_of_row

from docs.site.generate import without_blocks
from flagcore.cli.main import flag
from flagcore.domain.plan import Counts
from flagcore.domain.trial import TrialState
from flagcore.errors import RunError
from flagcore.report.text import funnel
from flagcore.spec.clusters import read_hosts

ROOT = Path(__file__).parents[2]
ROOMS = ("*.md", "docs/*.md", "[epx]*/*/README.md", "benchmarks/*.md", "findings/*.md")
PAGES = sorted(str(file.relative_to(ROOT)) for room in ROOMS for file in ROOT.glob(room))
"""All pages, a new one too."""
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
CAPTION = re.compile(r"\*\*`([^`]+)`\*\*(?: \(at its end\))?\n\n\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, the line of its fence, its language, what is in it, and the file that it shows."""

    page: str
    line: int
    language: str
    text: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.strip("\n").partition("\n")[0]


def blocks_of(page: str, text: str) -> tuple[Block, ...]:
    """Return the fenced blocks of a page, in their order."""
    found = []
    for match in FENCE.finditer(text):
        caption = CAPTION.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        inner = "\n".join(each.removeprefix(match[1]) for each in match[3].splitlines())
        found.append(Block(page, line, match[2], f"{inner}\n", caption[1] if caption else None))
    return tuple(found)


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page, without_blocks(TEXT[page])))


def prose(page: str) -> str:
    """Return a page without its blocks."""
    return FENCE.sub("", TEXT[page])


COLUMNS = re.compile(r"-+")
LINE = re.compile(r"^ *([A-Z][a-z ]+): ", re.MULTILINE)
"""The name of a line of a result."""


def _columns(text: str) -> list[dict[str, str]]:
    """Return the rows of a table by its headings: the line of dashes marks the columns."""
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


def _share(text: str) -> float:
    return 0.0 if text == "-" else float(text.rstrip("%")) / 100  # "-" is the baseline's


def result_of_a_run(block: Block) -> None:
    """The lines and columns are those of a real run, and its gains follow from its times."""
    rows, own = _columns(block.text), Path("runs/own/report.txt").read_text()
    assert list(rows[0]) == list(_columns(own)[0])
    answer = block.text.split("\ntrial ")[0]
    missing = set(LINE.findall(own.split("\ntrial ")[0])) - set(LINE.findall(answer))
    assert missing == set(), missing
    baseline, best = (next(row for row in rows if row["trial"].endswith(name)) for name in ("baseline", "best"))
    for row in rows:
        if row["median"] != "-":
            gain = float(row["median"].replace(",", "")) / float(baseline["median"].replace(",", "")) - 1
            assert _share(row["vs base"]) == pytest.approx(gain, abs=0.002)
        state, *_not_counted = row["state"].split(",")
        assert state == TrialState(state).value
    assert all(best[name] in answer for name in ("median", "vs base", "configuration"))
    assert baseline["configuration"] in answer


def headline(block: Block) -> None:
    """The first lines of a real run."""
    own = Path("runs/own/report.txt").read_text().split("\n\n")[0]
    assert set(LINE.findall(own)) <= set(LINE.findall(block.text))


def planned(block: Block) -> None:
    """The candidates of the first `flag estimate` of the page, as it still prints them."""
    line = re.findall(r"^flag (estimate .*)$", TEXT[block.page], re.MULTILINE)[0]
    found = _columns(CliRunner().invoke(flag, shlex.split(line)).stdout)
    shown = _columns(block.text)
    assert [{**each, "~step s": ""} for each in found] == [{**each, "~step s": ""} for each in shown]


def served(block: Block) -> None:
    """A run of servers: its gains follow from its rates."""
    rows = [row for row in _columns(block.text) if row["median"] != "-"]
    rates = [float(row["median"].replace(",", "")) for row in rows]
    assert [_share(row["vs base"]) for row in rows] == pytest.approx([rate / rates[0] - 1 for rate in rates], abs=1e-3)


def counts(block: Block) -> None:
    """The balanced counts of the tutorial's run, as the report prints them."""
    text = block.text.replace(",", "")
    found = {name.strip(): abs(int(number)) for name, number in re.findall(r"^(.+?) +(-?\d+)$", text, re.M)}
    rules: dict[str, dict[str, int]] = {kind: {} for kind in ("illegal", "pruned")}
    for name in [name for name in found if ": " in name]:
        kind, rule = name.split(": ")
        rules[kind][rule] = found.pop(name)
    fields = {"duplicates": "merged", "predicted not to fit": "does_not_fit", "stopped early": "stopped"}
    shown = Counts(**{fields.get(name, name): number for name, number in found.items()}, **rules)
    assert shown.balanced
    assert block.text.startswith(f"{funnel(shown)}\n")


def folders(block: Block) -> None:
    """Each folder of a layout exists."""
    assert all((ROOT / each.split()[0]).is_dir() for each in block.text.splitlines())


def hostfile(block: Block) -> None:
    """A host file, read as one."""
    Path("hosts").write_text(block.text)
    lines = read_hosts(Path("hosts"), file="page")
    assert len(lines) == len(block.text.splitlines())
    assert all(line.slots for line in lines)


def refusal(block: Block) -> None:
    """The key and the values that `flag tune` names if the spec of a run has changed."""
    changed = yaml.safe_load(Path("own.yaml").read_text())
    changed["auto_tuner"]["control"]["train_iters"] = 20
    Path("changed.yaml").write_text(yaml.safe_dump(changed))
    done = CliRunner().invoke(flag, ["tune", "changed.yaml", "--run-dir", "runs/own"])
    assert isinstance(done.exception, RunError)
    change = r"spec\.auto_tuner\.control\.train_iters: \d+ -> 20"
    assert re.search(change, str(done.exception))
    assert re.search(change, block.text)


def log_line(block: Block) -> None:
    """The line that the example folder's trials print, and which they were measured by."""
    assert block.text.strip("\n") in Path("runs/own/trials/0/stdout.log").read_text()


def knob_row(block: Block) -> None:
    """A row of Megatron's knobs."""
    for name, row in yaml.safe_load(block.text).items():
        assert knob_of_row(name, row).searchable


def left_to_readers(_block: Block) -> None:
    """A formula with its constants on its page, or commands of other tools."""


def fields_of_pods(block: Block) -> None:
    Path("pods.yaml").write_text(block.text)
    options = pod_options({"pods": "pods.yaml", "image": "image"})
    assert yaml.safe_load(block.text) in options.values()


SHOWN: Mapping[tuple[str, str], Callable[[Block], None]] = {
    ("README.md", "#    instances"): planned,
    ("README.md", "Best on 2 x cpu"): headline,
    ("docs/tutorial.md", "Best on 2 x cpu"): result_of_a_run,
    ("docs/index.md", "Best on 2 x cpu"): result_of_a_run,
    ("docs/tutorial.md", "#   DP  TP"): planned,
    ("docs/plan.md", "#   DP  TP"): planned,
    ("docs/serving.md", "#    instances"): planned,
    ("docs/serving.md", "Best on 2 x cpu"): served,
    ("docs/report.md", "combinations"): counts,
    ("docs/troubleshooting.md", "flag: runs/train-cpu belongs to another task"): refusal,
    ("docs/files.md", " iteration"): log_line,
    ("docs/spec.md", "node-a slots=8"): hostfile,
    ("docs/mixed.md", "node-1 slots=8 type=A800"): hostfile,
    ("docs/files.md", "nodeSelector:"): fields_of_pods,
    ("docs/agents.md", "{"): left_to_readers,
    ("docs/hosts.md", "flag manifest"): left_to_readers,
    ("docs/hosts.md", "flag: restart"): left_to_readers,
    ("CONTRIBUTING.md", "flagcore/ "): folders,
    ("CONTRIBUTING.md", "moe_permute_fusion:"): knob_row,
    ("docs/how-it-predicts.md", "static ="): left_to_readers,
    ("docs/how-it-predicts.md", "seconds ="): left_to_readers,
}
"""The page and the first words of a block, and its check."""
