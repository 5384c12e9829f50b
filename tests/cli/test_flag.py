"""`flag` itself: what it imports, and how it behaves among other programs."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import click
import pytest

from flagcore import api
from flagcore.cli import options
from flagcore.cli.main import OWN
from flagcore.plugins import IMPORTERS, command_readers, importer, names
from tests.cli.conftest import FLAG, Project, Ran

pytestmark = pytest.mark.slow

HEAVY = ("numpy", "pydantic", "optuna", "torch", "yaml", "stevedore", "pluggy", "rich", "psutil")
IMPORTED = """
import sys
from flagcore.cli import main
try:
    main(sys.argv[2:])
finally:
    found = [name for name in sys.argv[1].split(",") if name in sys.modules]
    print("imported:", *found, file=sys.stderr)
"""


def imported(project: Project, watched: tuple[str, ...], *arguments: str) -> list[str]:
    argv = [sys.executable, "-c", IMPORTED, ",".join(watched), *arguments]
    completed_process = subprocess.run(argv, capture_output=True, text=True, cwd=project.folder, check=True)
    return completed_process.stderr.strip().splitlines()[-1].split()[1:]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("tune", "--help"), ("estimate", "--help")])
def test_help_imports_nothing_heavy(project: Project, arguments: tuple[str, ...]) -> None:
    assert imported(project, HEAVY, *arguments) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_output_that_cannot_be_written_is_reported_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        completed_process = subprocess.run([*FLAG, "schema"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert completed_process.returncode == 2
    assert completed_process.stderr == "flag: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("shell", ['"$@" | true', 'exec "$@" >&-'], ids=["closed pipe", "closed"])
def test_output_that_nobody_reads_is_not_a_failure(shell: str) -> None:
    argv = ["/bin/bash", "-c", f"set -o pipefail; {shell}", "sh", *FLAG, "schema"]
    completed_process = subprocess.run(argv, stderr=subprocess.PIPE, text=True)
    assert (completed_process.returncode, completed_process.stderr) == (0, "")


def test_nohup_is_respected(project: Project) -> None:
    spec = project.spec(sleeps=0.1, control={"max_trials": 2, "repeats": 0})
    argv, pipe = ["nohup", *FLAG, "tune", spec, "-q", "--json"], subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, cwd=project.folder)
    folder = project.folder / "runs" / "spec" / "trials" / "0"
    while not (folder / "launch.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(json.loads(out)["trials"]) == 2


def test_a_misspelt_command_gets_a_suggestion(flag: Callable[..., Ran]) -> None:
    flag("estimat").refused(2, "'estimat'", "'estimate'?")
    assert "?" not in flag("zzz").err
    assert "'estimate'?" in flag("plan").err
    assert flag("-V").out == flag("--version").out


def test_help_lists_each_command_once_with_its_whole_summary(flag: Callable[..., Ran]) -> None:
    text = flag("--help").out
    assert "..." not in text.partition("Options:")[2]
    assert all(len(re.findall(rf"^  {name}  ", text, re.MULTILINE)) == 1 for name in OWN)
    assert max(map(len, text.splitlines())) <= 80
    imports, plugins = (flag(name, "--help").out.partition("Commands:")[2] for name in ("import", "plugins"))
    assert "..." not in imports + plugins
    assert all(name in imports for name in (*command_readers(), *(importer(name).title for name in names(IMPORTERS))))
    assert set(re.findall(r"[\w-]+", flag("export", "--help").out)) >= set(api.export_targets())


@pytest.mark.parametrize(
    "text", ["cluster.nodes", "=1", "cluster..nodes=1", "cluster.nodes=[1", "model.name.x=1", "a=1"]
)
def test_a_bad_setting_is_one_message(text: str, flag: Callable[..., Ran], project: Project) -> None:
    completed = flag("estimate", project.spec(), "--set", text)
    assert (completed.code, completed.out) == (2, "")
    assert len(completed.err.splitlines()) == 1
    assert text.partition("=")[0] in completed.err or "--set" in completed.err


def test_a_command_to_run_next_sets_each_key_once() -> None:
    context = click.Context(click.Command("size"))
    context.params = {"spec": "a.yaml", "settings": ("k=1", "j=2"), "slo": ()}
    with context:
        assert options.job_words(["k=3", "l=4"]) == ["a.yaml", "--set", "k=3", "--set", "j=2", "--set", "l=4"]
