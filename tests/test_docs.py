"""The pages are tested: links lead somewhere, snippets work, and the reference holds what the code really says.

What is run: `flag estimate`, `explain`, `devices`, `doctor` and `plugins list` in this process, `flag run` and
`best.sh` in one of their own, and `flag tune own.yaml` once, with a script that prints Megatron's log lines in place
of the tutorial's. What is only parsed: the `flag tune` lines, options and spec, since they would train for minutes;
tests of the loop train for real. Of `make` and `pip` lines the targets and extras are checked.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner

import flagcore
from flagcore import errors
from flagcore.cli.main import COMMANDS, flag
from flagcore.physics.schedules.named import SCHEDULES
from flagcore.report.text import SHORT
from flagcore.spec import parse_spec, read_spec
from flagcore.spec.serving import engines_of, only
from flagcore.stages.prune import LEARNED
from flagcore.workloads.megatron.reading import METRICS, STEPS

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += [f"docs/{file.name}" for file in ROOT.glob("docs/*.md")]
OURS = ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/tutorial.md", "docs/tutorial-node.md"]
OURS += ["docs/tutorial-plan.md", "docs/howto.md", "docs/comparison.md", "docs/cli.md", "docs/architecture.md"]
OURS += ["README.zh.md", "docs/tutorial.zh.md", "docs/tutorial-node.zh.md"]
"""Pages whose snippets are tested here; those of spec, hooks and write-a-plugin have tests of their own."""
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
REFERENCE = TEXT["docs/cli.md"]
NEEDS = {"plan.yaml": ("flagcore_metax", "flagcore_nvidia"), "cluster.yaml": ("flagcore_nvidia",)}
NEEDS["node.yaml"] = ("flagcore_metax", "flagcore_iluvatar")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CAPTIONED = re.compile(r"\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINKS = [(page, target) for page in PAGES for target in LINK.findall(FENCE.sub("", TEXT[page]))]
COMMAND_LINES = {
    line.removeprefix("$ "): page
    for page in OURS
    for language, block in FENCE.findall(TEXT[page])
    if language == "console"
    for line in block.splitlines()
}
"""Each line once, with the last of the pages that show it."""
YAML = [(page, block) for page in OURS for language, block in FENCE.findall(TEXT[page]) if language == "yaml"]
PATHS = sorted(
    {
        path
        for page in OURS
        for path in re.findall(r"`((?:flagcore|plugins|tests|examples|benchmarks|docs)/[\w./-]*)`", TEXT[page])
    }
)


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_link_leads_somewhere(page: str, target: str) -> None:
    if target.startswith("https://"):
        return
    name, _, anchor = target.partition("#")
    file = (ROOT / page).parent / name if name else ROOT / page
    assert file.exists()
    if anchor:
        assert anchor in [_slug(line) for line in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", PATHS)
def test_path_that_a_page_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("page", "block"), YAML)
def test_yaml_snippet_is_a_spec_or_a_part_of_one(page: str, block: str) -> None:
    part = yaml.safe_load(block)
    whole = {} if "serve" in part else yaml.safe_load((ROOT / "examples" / "train-cpu.yaml").read_text())
    for data in [only(part, engine) for engine in engines_of(part)] or [part]:
        parse_spec({**whole, **data}, file=page, base=ROOT)


@pytest.mark.parametrize(("line", "page"), COMMAND_LINES.items())
def test_command_line_works(line: str, page: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    program, *arguments = shlex.split(line)
    if Path(program).name == "flag":
        _try_flag(arguments)
    elif program == "sh":
        assert subprocess.run([program, *arguments], check=False, timeout=60, stdout=subprocess.DEVNULL).returncode == 0
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert all((ROOT / word.partition("=")[2]).exists() for word in arguments if "=" in word)
    else:
        assert line in ('pip install "flagcore[metax]"', ". .venv/bin/activate")


@pytest.mark.parametrize("page", OURS)
def test_extras_and_commands_that_a_page_names_exist(page: str) -> None:
    extras = set(re.findall(r"(?:flagcore|\.)\[(\w+)\]", TEXT[page]))
    known = set(re.findall(r'"(\w+)"', (ROOT / "hatch_build.py").read_text()))
    assert extras <= known
    assert set(re.findall(r"`flag ([a-z]+)", TEXT[page])) <= set(COMMANDS)


def test_python_snippets_work_in_order(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workshop)
    names: dict[str, Any] = {}
    for language, block in FENCE.findall(TEXT["docs/python.md"]):
        assert language == "python"
        exec(block, names)
    assert names["run"].best == names["outcome"].plan.best
    assert "2 spec: " in capsys.readouterr().out


def test_python_page_has_every_name_and_every_error() -> None:
    page = TEXT["docs/python.md"]
    public = set(flagcore.__all__) - {"__version__", "FlagError"}
    assert {name for name in public if f"`{name}" not in page} == set()
    table = page.split("## Errors")[1]
    kinds = {kind.__name__ for kind in _kinds(errors.FlagError) if kind.__module__ == "flagcore.errors"}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == kinds - {"FlagError"}


def test_reference_has_the_help_of_every_command_and_of_no_other() -> None:
    held = [" ".join(block.split()) for _, block in FENCE.findall(REFERENCE) if block.startswith("Usage:")]
    assert held == [" ".join(_help(path).split()) for path in sorted(_commands(flag, ()), key=_place)]


def test_readme_tells_the_accuracy_that_its_page_has() -> None:
    table = TEXT["docs/accuracy.md"].split("## Step time")[1].split("##")[0]
    rows = [row.split(" | ") for row in table.splitlines() if re.match(r"\| .* \| \d+ \| \d+ \| [\d.]+% ", row)]
    errors = {row[0].strip("| "): float(row[3].rstrip("%")) for row in rows}
    mean = errors.pop("**mean over sources that print a time**")
    told = re.search(
        r"Over (\d+) public sources.*? off by (\d+)% in the mean and by up to (\d+)% on", TEXT["README.md"]
    )
    assert told
    assert told.groups() == (str(len(errors)), f"{mean:.0f}", f"{max(errors.values()):.0f}")


def test_readme_tells_the_errors_of_sources_that_were_left_out_of_the_fit() -> None:
    families = json.loads((ROOT / "benchmarks" / "fitted.json").read_text(encoding="utf-8")).values()
    errors = [100 * source["left_out_mape"] for family in families for source in family["sources"].values()]
    mean = sum(errors) / len(errors)
    told = f"by {mean:.0f}% in the mean, {min(errors):.0f} to {max(errors):.0f}%, where a source had no part"
    assert told in " ".join(TEXT["README.md"].split())


def test_spec_page_tells_every_schedule() -> None:
    told = re.findall(r"^- `([\w-]+)`: ", TEXT["docs/spec.md"].split("`pipeline_schedule` is one of")[1], re.MULTILINE)
    assert told == list(SCHEDULES)


def test_reference_has_every_exit_code_and_no_other() -> None:
    codes = {0, *(kind.exit_code for kind in _kinds(errors.FlagError))}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)} == codes


def test_reference_has_every_field_of_a_result(workshop: Path) -> None:
    data = json.loads((workshop / "runs" / "own" / "result.json").read_text())
    section = REFERENCE.split("## result.json")[1]
    first, second = (re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE) for part in section.split("\nA trial:\n"))
    assert {name for row in first for name in re.findall(r"`(\w+)`", row)} == set(data)
    assert {name for row in second for name in re.findall(r"`(\w+)`", row)} == set(data["best"])
    best = data["best"]
    inner = {*_keys(best["predicted"]), *data["counts"], *best["measured"], *best["measured"]["step_time_s"]}
    assert {name for name in inner if f"`{name}`" not in section} == set()


def test_reference_has_every_file_of_a_run(workshop: Path) -> None:
    run = workshop / "runs" / "own"
    rows = re.findall(r"^\| (`.*?) \|", REFERENCE.split("## The files of a run")[1].split("\n## ")[0], re.MULTILINE)
    listed = {name for row in rows for name in _full_names(re.findall(r"`([^`]+)`", row))}
    found = {re.sub(r"^trials/\d+/", "trials/N/", str(file.relative_to(run))) for file in run.rglob("*")}
    found = {"best/" if name.startswith("best/") else name for name in found if (run / name).is_file() or "N/" in name}
    trial_program = {f"trials/N/{name}" for name in ("job.json", STEPS, METRICS)}
    assert listed == found | trial_program | {"best/"}


def test_tutorial_explains_what_the_table_and_the_books_show() -> None:
    page = TEXT["docs/tutorial.md"]
    learned = set(LEARNED) - {"does_not_fit"}
    assert {name for name in learned if f"`{name}`" not in page} == set()
    assert {short for short in SHORT.values() if short.isupper() and short not in page} == set()


def test_readme_marks_its_result_so_that_it_can_be_replaced() -> None:
    assert TEXT["README.md"].count("<!-- result -->") == TEXT["README.md"].count("<!-- /result -->") == 1


def test_picture_has_a_title_and_a_description() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "loop.svg").getroot()
    names = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in picture}
    assert names["title"]
    assert names["desc"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, the files that the pages show, and a finished run of the tutorial's `own.yaml`."""
    folder = tmp_path_factory.mktemp("workshop")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for page in OURS:
        for name, text in CAPTIONED.findall(TEXT[page]):
            (folder / name).write_text(text)
    (log_line,) = [block for _, block in FENCE.findall(TEXT["docs/tutorial.md"]) if "elapsed time per" in block]
    steps = "\n".join([log_line.rstrip()] * 4)
    (folder / "pretrain.sh").write_text(f"cat <<'LOG'\n{steps}\nLOG\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(flag, ["tune", "own.yaml", "--quiet", "--json"])
        assert done.exit_code == 0, done.output or done.exception
        assert json.loads(done.output)["best"]["measured"]["step_time_s"]["median"] == pytest.approx(0.4126)
    for name in ("train-cpu", "node"):  # the pages' other runs
        shutil.copytree(folder / "runs" / "own", folder / "runs" / name)
    return folder


def _try_flag(arguments: list[str]) -> None:
    """Run a command line, or only parse it if it would train."""
    for module in (module for word in arguments for module in NEEDS.get(word, ())):
        pytest.importorskip(module, reason="the page plans for a chip of this plugin")
    if arguments[0] == "tune":
        context = flag.make_context("flag", arguments.copy())
        command = flag.get_command(context, "tune")
        assert command is not None
        spec = command.make_context("tune", arguments[1:], parent=context).params["spec"]
        read_spec(Path(spec))
        return
    if arguments[0] == "run":  # replaces the process that asks for it
        code = "from flagcore.cli import main; main()"
        assert subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=60).returncode == 0
        return
    done = CliRunner().invoke(flag, arguments)
    assert done.exit_code == 0, done.output or done.exception
    assert done.output


def _slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _full_names(names: list[str]) -> Iterator[str]:
    """Yield the names of a row: the second one stands in the folder of the first."""
    folder = names[0].rpartition("/")[0] if not names[0].endswith("/") else ""
    for name in names:
        yield name if "/" in name or not folder else f"{folder}/{name}"


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*path, name))


def _place(path: tuple[str, ...]) -> int:
    """Return where a command's heading stands in the reference."""
    return REFERENCE.index("# " + " ".join(("flag", *path)) + "\n") if path else 0


def _help(path: tuple[str, ...]) -> str:
    return CliRunner().invoke(flag, [*path, "--help"], prog_name="flag", terminal_width=80).output


def _kinds(kind: type[errors.FlagError]) -> Iterator[type[errors.FlagError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _keys(data: Any) -> Iterator[str]:
    """Yield all keys of nested plain data."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield key
        yield from _keys(value)
