"""Results that are kept between commands: none is shown for anything else, and a bad file is as good as none."""

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flagcore_vendorkit import kept as keeping

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Candidate, Space
from flagcore.plugins.plugin import PluginProxy

FLOATS, INTS = np.array([0.1, np.nan, np.inf]), np.array([3, 1, 2])
MEMORY = dict.fromkeys(
    ("static_bytes", "activation_bytes", "peak_allocated_bytes", "reserved_bytes", "device_used_bytes"), FLOATS
)
PREDICTIONS = Predictions(
    step_time_s=FLOATS,
    low_s=FLOATS,
    high_s=FLOATS,
    time_s={"compute_s": FLOATS},
    **MEMORY,
    worst_stage=INTS,
    capacity_bytes=1e9,
    model_flops=0.1 + 0.2,
)
AXIS = Axis(knob="tp", values=(1, 2), neutral=None, words=(None, "a"), extra_values=(True, "x"))
RESULT = (Space((AXIS,), (INTS,), INTS, 7, {"cards": 4}), PREDICTIONS, np.inf, Candidate((("tp", None),)), True)


@dataclass
class Task:
    """What a test asks."""

    name: str
    file: Path
    sizes: Any = None


@dataclass
class Rate:
    """An object of a plugin with state."""

    per_s: float

    def seconds(self, sizes: Any) -> Any:
        return sizes / self.per_s


def _closure(state: float, rate: float = 1.0) -> Callable[..., object]:
    """Return a function of a plugin that knows `state`, and `rate` as a default."""

    def seconds(size: float, rate: float = rate) -> float:
        return size / rate + state

    return seconds


def _choice(first: bool) -> Callable[[float], float]:
    """Return one of two functions with the same name."""
    return (lambda size: size) if first else (lambda size: 2 * size)


class Commands:
    """Asks for a result, as commands do one after the other, and counts how often it is computed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.computed = folder, 0
        self.task: Any = Task("a", folder / "lengths.txt", np.arange(3))
        self.task.file.write_text("1 2 3")
        self.certain = True
        proxy = PluginProxy("acme", Rate(1.0))
        self.state: dict[str, Any] = {"closure": _closure(1.0), "method": Rate(1.0).seconds, "proxy": proxy}
        self.state |= {"lambda": _choice(first=True), "builtin": {"rate": 1.0}.get}

    def ask(self) -> Any:
        about = (self.task, self.state, {"tp": (1, 2)}, partial(min, 1))
        return keeping.kept(self._compute, about, lambda: self.certain)

    def _compute(self) -> Any:
        self.computed += 1
        self.state["proxy"].seconds(np.ones(1))  # as a prediction may
        return RESULT

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / "cache" / "flagcore" / "plans").glob("*"))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(keeping.SWITCH)
    monkeypatch.setattr(keeping, "LEAST_SECONDS", 0.0)
    package = tmp_path / "path" / "flagcore_acme"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "chips.yaml").write_text("rate: 1")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setitem(sys.modules, "flagcore_acme", None)
    monkeypatch.delitem(sys.modules, "flagcore_acme")
    import flagcore_acme  # noqa: F401

    yield Commands(tmp_path)
    sys.modules.pop("flagcore_acme", None)


def test_the_next_command_gets_the_same_result(commands: Commands) -> None:
    commands.ask()
    space, predictions, *plain = commands.ask()

    assert commands.computed == 1
    assert (space.axes, space.combinations, space.illegal) == ((AXIS,), 7, {"cards": 4})
    assert (space.rows.dtype, predictions.worst_stage.dtype) == (INTS.dtype, INTS.dtype)
    np.testing.assert_array_equal(predictions.time_s["compute_s"], FLOATS)
    assert (predictions.model_flops, plain) == (0.1 + 0.2, list(RESULT[2:]))


def _writes(file: str, text: str) -> Callable[[Commands, pytest.MonkeyPatch], object]:
    def change(commands: Commands, patch: pytest.MonkeyPatch) -> None:
        path = commands.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if path.exists() else None
        path.write_text(text)
        if before:  # also if the time is set back
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


CHANGES: dict[str, Callable[[Commands, pytest.MonkeyPatch], object]] = {
    "spec": lambda commands, patch: setattr(commands.task, "name", "b"),
    "number of the spec": lambda commands, patch: setattr(commands.task, "name", 1),
    "its type": lambda commands, patch: setattr(commands.task, "sizes", [0, 1, 2]),
    "array": lambda commands, patch: setattr(commands.task, "sizes", np.arange(3.0)),
    "one of many elements": lambda commands, patch: setattr(commands.task, "sizes", np.arange(3) ** 2),
    "state of a closure": lambda commands, patch: commands.state.update(closure=_closure(2.0)),
    "default of a function": lambda commands, patch: commands.state.update(closure=_closure(1.0, rate=2.0)),
    "function of the same name": lambda commands, patch: commands.state.update({"lambda": _choice(first=False)}),
    "object of a method": lambda commands, patch: commands.state.update(method=Rate(2.0).seconds),
    "object of a builtin method": lambda commands, patch: commands.state.update(builtin={"rate": 2.0}.get),
    "object of a plugin": lambda commands, patch: commands.state.update(proxy=PluginProxy("acme", Rate(2.0))),
    "file of the spec": _writes("lengths.txt", "1 2 4"),
    "data of a plugin": _writes("path/flagcore_acme/chips.yaml", "rate: 2"),
    "code of a plugin": _writes("path/flagcore_acme/__init__.py", "x = 1"),
    "new file of a plugin": _writes("path/flagcore_acme/new/choices.yaml", ""),
    "installed distribution": _writes("path/acme-1.0.dist-info/METADATA", "Name: acme"),
    "calibration": _writes("home/calibrations/a.json", "{}"),
    "experience": _writes("home/experience/a.jsonl", "{}"),
    "locale": lambda commands, patch: patch.setenv("FLAGCORE_LANG", "zh"),
    "disabled plugin": lambda commands, patch: patch.setenv("FLAGCORE_DISABLE_PLUGINS", "acme"),
    "visible devices": lambda commands, patch: patch.setenv("ACME_VISIBLE_DEVICES", "0"),
    "processors": lambda commands, patch: patch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 777}),
    "memory": lambda commands, patch: patch.setattr(os, "sysconf", lambda name: 1),
    "Python": lambda commands, patch: patch.setattr(sys, "version", "3.99"),
    "folders of modules": lambda commands, patch: patch.syspath_prepend(str(_made(commands.folder / "more"))),
    "switch": lambda commands, patch: patch.setenv(keeping.SWITCH, "off"),
}


def _made(folder: Path) -> Path:
    (folder / "other-2.0.dist-info").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_a_result_for_anything_else_is_computed(commands: Commands, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    commands.ask()
    CHANGES[name](commands, monkeypatch)

    commands.ask()

    assert commands.computed == 2


def test_variables_that_a_shell_changes_make_no_difference(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.ask()
    for name in keeping.PASSING:
        monkeypatch.setenv(name, "7")

    commands.ask()

    assert commands.computed == 1


def _with_objects(file: Path) -> None:
    with file.open("wb") as stream:
        np.savez(stream, plain=np.array([{"code": print}], dtype=object))


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.write_bytes(file.read_bytes().replace(b'"tp"', b'"pp"')),
        lambda file: file.write_text("{}"),
        _with_objects,
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.unlink(), file.symlink_to("/etc/passwd")),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)
def test_a_damaged_file_is_ignored(commands: Commands, damage: Callable[[Path], object]) -> None:
    commands.ask()
    damage(commands.files[0])

    assert commands.ask()[0].combinations == 7
    assert commands.computed == 2


def test_each_damaged_byte_is_noticed_named_and_replaced(commands: Commands, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="flagcore")
    commands.ask()
    (file,) = commands.files
    whole, chance = file.read_bytes(), Random(7)
    for number in range(12):
        place = chance.randrange(len(whole))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])

        assert commands.ask() is RESULT
        assert (commands.computed, len(caplog.records)) == (number + 2, number + 1)
    commands.ask()
    assert commands.computed == 13


def test_files_are_the_users_own(commands: Commands) -> None:
    commands.ask()
    (file,) = commands.files
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.parent.chmod(0o777)

    commands.ask()

    assert commands.computed == 2


def test_nothing_is_kept_of_what_is_uncertain_short_or_unknown(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "certain", False)
    commands.task.name = "uncertain"
    commands.ask()
    commands.certain = True
    monkeypatch.setattr(keeping, "LEAST_SECONDS", 1e9)
    commands.ask()
    monkeypatch.setattr(keeping, "LEAST_SECONDS", 0.0)
    commands.task = iter(())
    commands.ask()

    assert (commands.computed, commands.files) == (3, [])


def test_a_folder_that_cannot_be_written_keeps_nothing(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(commands.folder / "lengths.txt"))

    assert commands.ask() is RESULT


def test_old_files_and_those_beyond_the_limit_are_removed(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ALL_FILES", 2)
    for name in ("a", "b", "c"):
        commands.task.name = name
        commands.ask()
        for file in commands.files:
            os.utime(file, (time.time() - 9, file.stat().st_mtime - 9))
    first = commands.files
    commands.task.name = "b"
    commands.ask()
    commands.task.name = "d"
    commands.ask()

    assert (commands.computed, len(first), len(commands.files)) == (4, 2, 2)
    monkeypatch.setattr(keeping, "MOST_DAYS", -1)
    commands.task.name = "e"
    commands.ask()
    assert commands.files == []
