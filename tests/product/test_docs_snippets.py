"""Every block of every page is run, parsed or compared. A new block without a check fails.

The commands of a page run line by line in the page's own copy of the example folder. Commands that would train or serve
for minutes run at the fidelity `estimate`, and measurements take seconds. `make` and `pip` lines are compared with the
Makefile and the extras. `SHOWN` maps blocks that are neither commands nor files nor code to their checks.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from flagcore.api.inputs import read_spec
from flagcore.cli.main import flag
from flagcore.domain.spec import TrainSpec
from flagcore.plugins import engines, kinds
from flagcore.spec.convert import engines_of, parse_spec, select_engine
from tests.product.block_checks import BLOCKS, ROOT, SHOWN, TEXT, Block, blocks_of

pytestmark = pytest.mark.slow

OWN_TEST = {
    "docs/hooks.md": "python",
    "docs/plugin-data.md": "",
    "docs/write-a-layer.md": "",
    "docs/write-a-plugin.md": "",
    "docs/write-an-engine.md": "",
}
"""Pages with tests of their own: test_docs_examples.py (of hooks: Python only), test_docs_plugin.py, test_mixers.py."""
PLANNED = {"plan.yaml": ("flagcore_metax", "flagcore_nvidia"), "cluster.yaml": ("flagcore_nvidia",)}
PLANNED |= {
    "job.yaml": ("flagcore_nvidia",),
    "serve.yaml": ("flagcore_nvidia",),
    "examples/portability.yaml": ("flagcore_metax",),
}
PLANNED |= {"my-model.yaml": ("flagcore_nvidia",), "two-kinds.yaml": ("flagcore_metax", "flagcore_nvidia")}
PLANNED |= {"examples/train-1024-probe.yaml": ("flagcore_nvidia",)}
"""Files that plan for chips of plugins."""
PROGRAMS = ("docs/agents.md",)
"""Pages whose Python is a program of its own: it hands its stderr to a process, and pytest's has no descriptor."""
NOT_RUN = {
    "flag calibrate --collectives tune.yaml": "needs a chip with variables; tests of the simulated device run it",
    "flag export runs/serve --to compose": "needs a run of servers; tests of targets write its files",
    "flag run MODEL --chip auto": "needs weights and a server; a test of llama.cpp starts one",
    "flag run runs/own --restarts 20 --spares node-7,node-8": "needs hosts; tests of hosts lose them",
    "flag run runs/serve": "needs weights and a server; tests of serving start a winner",
    "flag size serve.yaml --rate 20 --chip H20=1.2 --chip H100=3": "takes a minute; tests of sizing do the same",
    "flag size serve.yaml --rate 20 --to keda --name chat": "takes a minute; tests of sizing write autoscalers",
    "flag size --run runs/replica --rate 20": "needs a run of servers; tests of sizing read one",
    "flag tune spec.yaml --watch tensorboard --watch webhook": "tests of watchers run them",
    'pip install "flagcore[tensorboard]"': "not in the index yet; tools/release.py installs what extras require",
    "optuna-dashboard runs/own/journal.log": "a server of another project; tests of the store read the study",
}
ENVIRONMENT = ("python3 -m venv .venv", ". .venv/bin/activate")
CALIBRATED: list[str] = []
"""Not empty once a page's `flag calibrate` was followed: it is the same on all, and the longest."""


def is_own(block: Block) -> bool:
    """Return whether a test of the page's own takes the block."""
    return block.page in OWN_TEST and OWN_TEST[block.page] in ("", block.language)


def is_translated(block: Block) -> bool:
    """Return whether the page that this one translates has the same block, comments aside."""
    original = block.page.replace(".zh.md", ".md")
    if original == block.page or original not in TEXT:
        return False
    return _bare(block) in [_bare(each) for each in blocks_of(original, TEXT[original])]


def _bare(block: Block) -> str:
    return re.sub(r"\s*# .*$|^\$ ", "", block.text, flags=re.MULTILINE)


OWN_BLOCKS = [block for block in BLOCKS if not is_own(block) and not is_translated(block)]
COMMANDS = [block for block in OWN_BLOCKS if block.file is None and block.language in ("bash", "console")]
SPECS = [block for block in OWN_BLOCKS if block.language == "yaml"]
SCRIPTS = [block for block in OWN_BLOCKS if block.language == "bash" and block.file]
CODE = sorted({block.page for block in OWN_BLOCKS if block.language == "python"})
CHECKED = ("yaml", "bash", "python")
OTHERS = [block for block in OWN_BLOCKS if block not in COMMANDS and block.language not in CHECKED]


@pytest.mark.costly
@pytest.mark.parametrize("block", OTHERS, ids=str)
def test_a_block_that_is_not_run_is_valid(block: Block, example_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(example_folder)
    checks = [
        check for (page, start), check in SHOWN.items() if (page, start) == (block.page, block.first[: len(start)])
    ]
    assert checks, f"{block}: nothing checks this block; make it console, yaml or python, or add it to block_checks.py"
    for check in checks:
        check(block)


@pytest.mark.parametrize("block", SPECS, ids=str)
def test_yaml_blocks_are_specs_or_parts_of_one(block: Block, example_folder: Path) -> None:
    part = yaml.safe_load(block.text)
    complete_spec = (
        {} if {"serve", "rl"} & part.keys() else yaml.safe_load((ROOT / "examples" / "train-cpu.yaml").read_text())
    )
    if "engine" in part.get("train", {}):
        complete_spec.pop("auto_tuner")
    for data in [select_engine(part, engine, kinds()) for engine in engines_of(part, kinds())] or [part]:
        parse_spec({**complete_spec, **data}, file=block.page, base=example_folder, engines=engines(data))


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_script_can_be_read_by_its_shell(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("page", CODE)
def test_python_of_a_page_works_in_order(page: str, folder_of: Callable[[str], Path], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder_of(page))
    blocks = [block for block in OWN_BLOCKS if block.page == page and block.language == "python"]
    if page in PROGRAMS:
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        source = "\n".join(block.text for block in blocks)
        subprocess.run([sys.executable, "-c", source], check=True, timeout=120, stdout=subprocess.DEVNULL)
        return
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(ast.parse(block.text), str(block), "exec"), names)
    if "run" in names:
        assert names["run"].best == names["outcome"].plan.best


@pytest.mark.parametrize("page", sorted({block.page for block in COMMANDS}))
def test_command_lines_are_valid(page: str, example_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(example_folder)
    for block in (block for block in COMMANDS if block.page == page):
        for line in block.text.splitlines():
            _check(line.removeprefix("$ "))


def _check(line: str) -> None:
    """Raise if a line names a program, command, option, argument, target or extra that does not exist."""
    program, *arguments = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z]+=", word)]
    if Path(program).name != "flag":
        assert line in ENVIRONMENT or Path(program).name in FOLLOWERS, line
        if Path(program).name in ("make", "pip"):
            FOLLOWERS[Path(program).name](arguments)
        return
    context, command = click.Context(flag, info_name="flag"), flag
    while isinstance(command, click.Group) and arguments and arguments[0] != "--help":
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None, line
        context, command = click.Context(found, info_name=name, parent=context), found
    if arguments != ["--help"]:
        command.make_parser(context).parse_args(args=arguments)


@pytest.mark.long
@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_work(block: Block, folder_of: Callable[[str], Path], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder_of(block.page))
    for line in block.text.splitlines():
        run_line(line.removeprefix("$ "))


def run_line(line: str) -> None:
    """Run a command line, or a shorter form of it."""
    program, *arguments = shlex.split(line, comments=True)
    if line in NOT_RUN or line in ENVIRONMENT:
        return
    if arguments == ["calibrate"] and CALIBRATED:
        return
    follower = FOLLOWERS.get(Path(program).name)
    assert follower, f"{line}: no rule for this program"
    follower(arguments)


def _flag(arguments: list[str]) -> None:
    for module in (module for word in arguments for module in PLANNED.get(word, ())):
        pytest.importorskip(module, reason="the page plans for a chip of this plugin")
    for name in [arguments[place + 1] for place, word in enumerate(arguments) if word in ("-o", "--output")]:
        Path(name).unlink(missing_ok=True)  # another page's file
    if arguments[0] == "run":  # replaces its own process
        code = "from flagcore.cli import main; main()"
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60, stdout=subprocess.DEVNULL)
        return
    done = CliRunner().invoke(flag, _shorter(arguments))
    assert done.exit_code == 0, f"flag {shlex.join(arguments)}\n{done.output}\n{done.exception!r}"
    assert done.output


def _shorter(arguments: list[str]) -> list[str]:
    """Return a command line that does the same in seconds."""
    if arguments == ["calibrate"]:
        CALIBRATED.append("once")
        return [*arguments, "--seconds", "5", "--devices", "1"]
    if arguments[0] == "probe":  # needs the chip
        return ["estimate", *_parsed(arguments)]
    if arguments[0] != "tune":
        return arguments
    source = _parsed(arguments)
    if len(source) > 1:
        return ["estimate", *source, "--chip", _any_chip()]
    spec = read_spec(source[0])
    command = (spec.work.command or ()) if isinstance(spec.work, TrainSpec) else ()
    of_flagscale = any("flagscale" in word for word in command)  # it is not installed, and its tree lacks data
    if of_flagscale or (spec.cluster.chip == "auto" and isinstance(spec.cluster.devices_per_node, int)):
        return ["estimate", *source, "--chip", _any_chip()]
    if command:
        return arguments
    return [*arguments, "--fidelity", "estimate", "--run-dir", "runs/predicted", "--new"]


def _any_chip() -> str:
    """Return a chip of an accelerator, for specs that say auto."""
    pytest.importorskip("flagcore_nvidia", reason="the page leaves the chip to the machine, and this one has none")
    return "H200"


def _parsed(arguments: list[str]) -> list[str]:
    """Return what a command reads, once click has taken its whole line: a spec, or a tree with its overrides."""
    context = flag.make_context("flag", arguments.copy())
    command = flag.get_command(context, arguments[0])
    assert isinstance(command, click.Command)
    overrides = command.make_context(arguments[0], arguments[1:], parent=context).params
    if overrides.get("config_path"):
        words = [overrides["spec"], *overrides["overrides"]] if overrides["spec"] else [*overrides["overrides"]]
        return [
            "--config-path",
            str(overrides["config_path"]),
            "--config-name",
            overrides["config_name"],
            *map(str, words),
        ]
    return [str(overrides["spec"])]


def _make(arguments: list[str]) -> None:
    targets = [word for word in arguments if "=" not in word]
    assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    overrides = dict(word.split("=", 1) for word in arguments if "=" in word)
    assert all((ROOT / value).exists() for name, value in overrides.items() if name == "TESTS")


def _pip(arguments: list[str]) -> None:
    assert arguments[0] in ("install", "download")
    extras = (ROOT / "hatch_build.py").read_text() + (ROOT / "pyproject.toml").read_text()
    for word in (word for word in arguments[1:] if not word.startswith("-")):
        name, _, extra = word.rstrip("]").partition("[")
        assert name in (".", "flagcore", "optuna-dashboard", "wheels") or name.partition("==")[0] in extras, word
        assert not extra or all(f'"{each}"' in extras for each in extra.split(",")), word


FOLLOWERS: dict[str, Callable[[list[str]], object]] = {
    "flag": _flag,
    "make": _make,
    "pip": _pip,
    "bash": lambda arguments: subprocess.check_output(["bash", *arguments], timeout=60),
    "optuna-dashboard": lambda arguments: None,
}


@pytest.fixture(scope="module")
def folder_of(example_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Yield a function that returns the folder of a page, a copy of the example folder with the results of the page."""
    folders: dict[str, Path] = {}
    patch = pytest.MonkeyPatch()

    def folder(page: str) -> Path:
        if page not in folders:
            folders[page] = tmp_path_factory.mktemp("page") / "reader"
            shutil.copytree(example_folder, folders[page])
        patch.setenv("FLAGCORE_HOME", str(folders[page] / "home"))
        return folders[page]

    yield folder
    patch.undo()
