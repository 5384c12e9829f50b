"""Each way in which an installed plugin can be broken costs that plugin and no other."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from flagcore import plugins
from flagcore.contracts import Engine
from flagcore.errors import NoDevice, SpecError
from flagcore.plugins import ENGINES, STRATEGIES, LoadedPlugins, PluginFailure, find_engine, load_plugins, strategy
from flagcore.tuner.stages.complete import engine_version
from tests import tasks
from tests.checks import refuses

Install = Callable[..., None]

GOOD = """
from flagcore.hooks import hookimpl

@hookimpl
def flagcore_environment(chip, engine):
    return {"GOOD": "1"}
"""


def failure(loaded: LoadedPlugins, name: str) -> PluginFailure:
    (found,) = (failure for failure in loaded.failures if failure.name == name)
    return found


def load_with_good(install: Install, source: str, *, requires: str = "flagcore>=0.1,<0.2") -> PluginFailure:
    """Install a good plugin beside a bad one, check that the good one is unhurt, return the bad one's failure."""
    install("flagcore-good", {"good": "good_plugin"}, {"good_plugin": GOOD})
    install("flagcore-bad", {"bad": "bad_plugin"}, {"bad_plugin": source}, requires=requires)
    loaded = load_plugins()
    names = [plugin.name for plugin in loaded.plugins]
    assert "good" in names
    assert "bad" not in names
    found = failure(loaded, "bad")
    assert found.distribution == "flagcore-bad"
    assert "\n" not in found.reason
    return found


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("assert 1 == 2, 'bad assumption'", "AssertionError: bad assumption"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise BaseException('rude')", "BaseException: rude"),
        ("def broken(:", "SyntaxError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("raise RuntimeError('two\\nlines and \\x1b[31mred')", "RuntimeError: two lines and [31mred"),
    ],
)
def test_plugin_that_cannot_be_imported_is_listed_and_the_others_still_work(
    install: Install, source: str, words: str
) -> None:
    found = load_with_good(install, source)
    assert found.stage == "load"
    assert words in found.reason


@pytest.mark.parametrize("source", ["os._exit(0)", "class Plugin:\n    os._exit(0)"])
def test_an_import_cannot_end_the_process(install: Install, source: str) -> None:
    assert load_with_good(install, f"import os\n{source}").reason == "called os._exit(0)"


@pytest.mark.parametrize("source", ["Event().wait()", "class Plugin:\n    Event().wait()"])
def test_an_import_that_does_not_end_is_given_up_and_not_tried_again(
    install: Install, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr("flagcore.loading.entry_points.LOAD_SECONDS", 0.3)
    name = f"endless_{len(source)}"
    install("flagcore-endless", {"endless": name}, {name: f"from threading import Event\n{source}"})
    assert "did not end within 0.3 s" in failure(load_plugins(), "endless").reason
    monkeypatch.setattr("flagcore.loading.entry_points.LOAD_SECONDS", 60.0)
    assert "did not end within 0.3 s" in failure(load_plugins(), "endless").reason


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@hookimpl\ndef flagcore_device(): return []", ["flagcore_device ", "flagcore_devices?"]),
        ("@hookimpl\ndef flagcore_telemeter(): return []", ["flagcore_telemeter", "flagcore_telemetry"]),
        ("def flagcore_devices(): return []", ["flagcore_devices lacks @hookimpl"]),
        ("@hookimpl\ndef flagcore_environment(chip, motor): return {}", ["flagcore_environment", "motor"]),
        ("x = 1", ["implements no hook"]),
    ],
)
def test_wrong_hooks_of_a_plugin_are_reported_with_the_fix(install: Install, source: str, words: list[str]) -> None:
    found = load_with_good(install, f"from flagcore.hooks import hookimpl\n{source}\n")
    assert found.stage == "check"
    assert all(word in found.reason for word in words), found.reason


def test_entry_point_that_names_nothing_or_a_class_is_reported(install: Install) -> None:
    source = GOOD + "\nclass Plugin: pass\n"
    install("flagcore-a", {"nothing": "plugin_a:missing", "a_class": "plugin_a:Plugin"}, {"plugin_a": source})
    loaded = load_plugins()
    assert "AttributeError" in failure(loaded, "nothing").reason
    assert "names the class Plugin" in failure(loaded, "a_class").reason


def test_two_distributions_with_one_plugin_name_are_both_refused(install: Install) -> None:
    install("flagcore-one", {"twin": "one"}, {"one": GOOD})
    install("flagcore-two", {"twin": "two"}, {"two": GOOD})
    loaded = load_plugins()
    assert "twin" not in [plugin.name for plugin in loaded.plugins]
    found = failure(loaded, "twin")
    assert found.stage == "discover"
    assert found.distribution == "flagcore-one, flagcore-two"
    assert "flagcore-one, flagcore-two" in found.reason


@pytest.mark.parametrize(
    "requires", ["flagcore>=9", "flagcore<0.1", "Flagcore (>=9)", "flagcore[x] >=9 ; python_version>'3'"]
)
def test_plugin_for_another_flagcore_is_not_imported(install: Install, requires: str) -> None:
    found = load_with_good(install, "raise RuntimeError('was imported')", requires=requires)
    assert "this is flagcore 0." in found.reason
    assert "was imported" not in found.reason


@pytest.mark.parametrize("requires", ["", "flagcore", "flagcore>=9; extra == 'future'", "numpy>=99"])
def test_other_requirements_do_not_matter(install: Install, requires: str) -> None:
    install("flagcore-good", {"good": "good_plugin"}, {"good_plugin": GOOD}, requires=requires)
    assert "good" in [plugin.name for plugin in load_plugins().plugins]


def test_distribution_that_cannot_be_read_does_not_hide_the_others(install: Install, tmp_path: Path) -> None:
    install("flagcore-good", {"good": "good_plugin"}, {"good_plugin": GOOD})
    garbled = tmp_path / "garbled-1.0.dist-info"
    garbled.mkdir()
    (garbled / "entry_points.txt").write_bytes(b"[flagcore.plugins]\nx = \xff\xfe\n")
    nameless = tmp_path / "nameless-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[flagcore.plugins]\ny = y\n")
    loaded = load_plugins()
    assert "good" in [plugin.name for plugin in loaded.plugins]
    places = [failure.name for failure in loaded.failures if failure.stage == "discover"]
    assert any("garbled" in place for place in places)
    assert any("nameless" in place for place in places)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_disabled_plugin_is_not_imported(install: Install, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    install("flagcore-bad", {"bad": "bad_plugin"}, {"bad_plugin": "raise RuntimeError('was imported')"})
    install("flagcore-good", {"good": "good_plugin"}, {"good_plugin": GOOD})
    if by == "environment":
        monkeypatch.setenv("FLAGCORE_DISABLE_PLUGINS", "bad, goood,")
    loaded = load_plugins(() if by == "environment" else ["bad", "goood"])
    assert "good" in [plugin.name for plugin in loaded.plugins]
    assert "bad" not in [failure.name for failure in loaded.failures]
    unknown = failure(loaded, "goood")
    assert unknown.stage == "disable"
    assert "did you mean good?" in unknown.reason


def test_keyboard_interrupt_ends_loading(install: Install) -> None:
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2)"
    install("flagcore-bad", {"bad": "bad_plugin"}, {"bad_plugin": code})
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


@pytest.mark.slow
def test_output_of_a_plugin_goes_to_stderr(install: Install, tmp_path: Path) -> None:
    source = "import os\nprint('by python')\nos.write(1, b'by the system')\nos.system('echo by a child')\n" + GOOD
    install("flagcore-loud", {"loud": "loud_plugin"}, {"loud_plugin": source})
    done = run_load_plugins(tmp_path, "print(*[p.name for p in loaded.plugins])")
    assert "by" not in done.stdout
    assert "loud" in done.stdout.split()
    assert all(word in done.stderr for word in ("by python", "by the system", "by a child"))


@pytest.mark.slow
def test_plugins_load_with_closed_standard_streams(install: Install, tmp_path: Path) -> None:
    install("flagcore-loud", {"loud": "loud_plugin"}, {"loud_plugin": "print('hello')\n" + GOOD})
    result = tmp_path / "result"
    then = f"open({str(result)!r}, 'w').write(repr(loaded.failures) + ' '.join(p.name for p in loaded.plugins))"
    run_load_plugins(tmp_path, then, shell=">&- 2>&-")
    assert result.read_text().startswith("()")
    assert "loud" in result.read_text()


@pytest.mark.costly
def test_new_and_changed_plugins_are_seen_at_once_with_and_without_a_home(install: Install, tmp_path: Path) -> None:
    install("flagcore-first", {"first": "first_plugin"}, {"first_plugin": GOOD})
    unwritable = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
    cached = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for settings in (unwritable, cached):
        done = run_load_plugins(tmp_path, "print(*[p.name for p in loaded.plugins])", settings)
        assert "first" in done.stdout.split()
    points = tmp_path / "flagcore_first-1.0.dist-info" / "entry_points.txt"
    points.write_text("[flagcore.plugins]\nrenamed = first_plugin\n")
    names = run_load_plugins(tmp_path, "print(*[p.name for p in loaded.plugins])", cached).stdout.split()
    assert "renamed" in names
    assert "first" not in names


@pytest.mark.slow
def test_plugins_load_without_torch_and_optuna(install: Install, tmp_path: Path) -> None:
    done = run_load_plugins(tmp_path, "import sys; print('torch' in sys.modules, 'optuna' in sys.modules)")
    assert done.stdout.split() == ["False", "False"]


def run_load_plugins(
    folder: Path, then: str, settings: dict[str, str] | None = None, shell: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run load_plugins() in a fresh interpreter that sees `folder`; `shell` redirects its streams."""
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    code = f"from flagcore.plugins import load_plugins; loaded = load_plugins(); {then}"
    environment = {**os.environ, **(settings or {}), "PYTHONPATH": path}
    argv = ["sh", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, code]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)


STRATEGY = """
class First:
    name = "first"

    def next(self, open_rows, predictions, space, trials):
        return int(open_rows[0])

STRATEGY = First()
NOT_ONE = object()
"""


def install_strategies(install: Install, points: dict[str, str], distribution: str = "flagcore-extra") -> None:
    install(distribution, points, {f"{distribution.replace('-', '_')}": STRATEGY}, group=STRATEGIES)


def test_an_unknown_name_is_a_spec_error_with_a_suggestion(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_strategies(install, {"first_come": "flagcore_extra:STRATEGY"})
    monkeypatch.setattr("flagcore.plugins.entry_points._requires", lambda name: [])  # whatever is missing here
    with refuses("auto_tuner.strategy", "frist_come") as caught:
        strategy("frist_come")
    assert "first_come" in caught.value.fix


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:X", "ModuleNotFoundError"),
        ("flagcore_extra:First", "the class First"),
        ("flagcore_extra:NOT_ONE", "no method next"),
    ],
)
def test_a_broken_object_is_reported_as_no_device_with_its_reason_and_origin(
    install: Install, value: str, words: str
) -> None:
    install_strategies(install, {"broken": value})
    with pytest.raises(NoDevice, match="flagcore-extra") as caught:
        strategy("broken")
    assert words in str(caught.value)


def test_an_engine_that_does_not_inherit_the_base_class_is_refused(install: Install) -> None:
    install("flagcore-extra", {"half": "flagcore_extra:STRATEGY"}, {"flagcore_extra": STRATEGY}, group=ENGINES)
    with pytest.raises(NoDevice, match=r"flagcore\.contracts\.Engine"):
        find_engine("half")


def test_a_name_of_a_missing_distribution_names_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("flagcore-here", {})
    needs = [
        "flagcore-here==0.1.0",
        "flagcore-fleet @ file:///there",
        'flagcore-ring==0.1.0; extra == "ring"',
        "pluggy",
    ]
    monkeypatch.setattr("flagcore.plugins.entry_points._requires", lambda name: needs)
    for name, fix in {"fleet": "flagcore-fleet", "rsh": "flagcore-fleet", "ring": '"flagcore[ring]"'}.items():
        with pytest.raises(SpecError) as caught:
            plugins.launcher(name)
        assert caught.value.fix == f"pip install {fix}"


def test_an_engine_does_the_work_of_a_spec_or_is_refused_with_its_key(install: Install) -> None:
    install("flagcore-toy", {"toy": "flagcore_testing.toy:ENGINE"}, group=ENGINES)
    train = tasks.task().spec.work
    assert plugins.engine_of(train).name == "toy"
    serve = tasks.Service(engine="unknown")
    for key, work in (("serve.engine", serve), ("train.engine", replace(train, engine="unknown"))):
        with refuses(key, "unknown"):
            plugins.engine_of(work)


@pytest.mark.parametrize(
    ("name", "distribution", "version"),
    [("trt", "tensorrt-llm", "1.0"), ("trt", "", None), ("tensorrtllm", "", "1.0"), ("trt", "not-installed", None)],
)
def test_release_comes_from_the_named_distribution(
    install: Install, name: str, distribution: str, version: str | None
) -> None:
    install("tensorrt-llm", {})
    engine = SimpleNamespace(name=name, modules={"tensorrt_llm": "tensorrt-llm>=1"}, distribution=distribution)
    assert engine_version(tasks.task().spec, cast("Engine", engine)) == version


def test_without_a_page_its_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore.plugins.entry_points.names", lambda group: ())
    with pytest.raises(NoDevice, match="flagcore-page"):
        plugins.page_writer()
