"""`flag plugins new` and `flag plugins check`: a new plugin passes, and faults are reported with a fix."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.product.cli.conftest import Flag

pytestmark = pytest.mark.slow
Failures = Callable[[], list[dict[str, str]]]


@pytest.fixture
def acme(flag: Flag, tmp_path: Path) -> Path:
    """A new plugin, as it is written."""
    completed = flag("plugins", "new", "acme", "--vendor", "ACME", "--directory", str(tmp_path)).worked()
    assert f"pip install -e {completed.out.strip()} && flag plugins check {completed.out.strip()}" in completed.err
    return Path(completed.out.strip())


@pytest.fixture
def failures(flag: Flag, acme: Path) -> Failures:
    """Check the new plugin, in which something is wrong, and return the failures."""

    def check() -> list[dict[str, str]]:
        completed = flag("plugins", "check", str(acme), "--format", "json")
        assert completed.code == 4
        found: list[dict[str, str]] = json.loads(completed.out)["plugins"][0]["failures"]
        return found

    return check


def test_a_new_plugin_passes_every_check_and_lists_its_placeholders(flag: Flag, acme: Path) -> None:
    completed = flag("plugins", "check", str(acme)).worked()
    assert re.match(r"acme 0\.1\.0: \d+ passed, 0 failed", completed.out)
    assert "to fill in:" in completed.out
    assert "flagcore_acme/chips/a1.yaml:5" in completed.out


def test_a_new_plugin_with_all_options_passes_every_check(flag: Flag, tmp_path: Path) -> None:
    detection = ("--tool", "ac-gmi info", "--visible", "AC_RT_VISIBLE", "--torch-device", "tpx", "--backend", "accl")
    detection += ("--preload", "torch_tpx", "--preload", "acme.adaptor")
    chips = ("--chip", "A1", "--chip", "B2")
    created = flag("plugins", "new", "acme", *chips, *detection, "--directory", str(tmp_path)).worked()
    completed = flag("plugins", "check", created.out.strip(), "--format", "json").worked()
    (plugin,) = json.loads(completed.out)["plugins"]
    assert list(plugin) == ["name", "version", "passed", "failed", "skipped", "failures", "by_hand"]
    assert (plugin["name"], plugin["version"], plugin["failed"], plugin["failures"]) == ("acme", "0.1.0", 0, [])
    assert plugin["by_hand"]
    assert plugin["passed"] >= 40


@pytest.mark.parametrize(
    ("hook", "reported"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; os._exit(0)", "exit status 0 ended the process"),
        ("raise ImportError('libacme.so.1')", "libacme.so.1"),
    ],
)
def test_a_plugin_that_crashes_or_does_not_load_is_a_failed_check(
    failures: Failures, acme: Path, hook: str, reported: str
) -> None:
    hooks = acme / "flagcore_acme/hooks.py"
    hooks.write_text(hooks.read_text().replace("from __future__ import annotations\n", f"{hook}\n"))
    (failure,) = failures()
    assert failure["check"] == "plugin_loads"
    assert reported in failure["message"]


@pytest.mark.parametrize(("old", "reported"), [("[project]", "is not TOML"), ("flagcore.plugins", "names no plugin")])
def test_a_broken_pyproject_is_a_failed_check(failures: Failures, acme: Path, old: str, reported: str) -> None:
    file = acme / "pyproject.toml"
    file.write_text(file.read_text().replace(old, old[:-1], 1))
    (failure,) = failures()
    assert reported in failure["message"]
    assert failure["fix"]


def test_a_hanging_check_is_aborted(failures: Failures, acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore_testing.runner.CHECK_SECONDS", 8.0)
    hooks = acme / "flagcore_acme/hooks.py"
    endless = """

from flagcore.hooks import hookimpl

class Endless(VendorPlugin):
    @hookimpl
    def flagcore_check_task(self):
        import time
        time.sleep(100)

plugin = Endless(**vars(plugin))
"""
    hooks.write_text(hooks.read_text() + endless)
    assert "it took more than 8 s" in failures()[-1]["message"]
    left = [each for each in psutil.process_iter(["cmdline"]) if str(acme) in " ".join(each.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=5)[1]


def test_installed_plugins_are_checked_by_name(flag: Flag) -> None:
    (plugin,) = json.loads(flag("plugins", "check", "cpu", "--format", "json").out)["plugins"]
    assert (plugin["name"], plugin["failed"]) == ("cpu", 0)


def test_an_unknown_plugin_is_reported_with_the_nearest(flag: Flag, tmp_path: Path) -> None:
    completed = flag("plugins", "check", "metaxx")
    assert (completed.code, "did you mean metax?" in completed.err) == (2, True)
    assert flag("plugins", "check", str(tmp_path)).code == 2
    assert flag("plugins", "check", "cpu", "--all").code == 2


def test_existing_files_are_not_overwritten(flag: Flag, acme: Path) -> None:
    readme_before = (acme / "README.md").read_text()
    completed = flag("plugins", "new", "acme", "--directory", str(acme.parent))
    assert (completed.code, "exists already" in completed.err) == (2, True)
    assert (acme / "README.md").read_text() == readme_before


@pytest.mark.parametrize(
    ("option", "word"),
    [
        *(("NAME", name) for name in ("Acme", "1acme", "ac-me", "class", "cpu", "", "../up")),
        ("--chip", "cpu"),
        ("--chip", "A 1"),
        ("--chip", "a1"),
        ("--vendor", 'A"B'),
        ("--vendor", ""),
        ("--tool", ""),
        ("--tool", "/opt/acme-smi"),
        ("--tool", "acme-smi  'info'"),
        ("--visible", "ACME VISIBLE"),
        ("--torch-device", "NPU"),
        ("--backend", ""),
        ("--preload", "torch-acme"),
    ],
)
def test_what_another_plugin_has_and_invalid_values_are_refused(
    flag: Flag, tmp_path: Path, option: str, word: str
) -> None:
    arguments = (word,) if option == "NAME" else ("acme", "--chip", "A1", option, word)
    completed = flag("plugins", "new", *arguments, "--directory", str(tmp_path))
    assert (completed.code, f"{option} {word!r}" in completed.err) == (2, True)
    assert list(tmp_path.iterdir()) == []
