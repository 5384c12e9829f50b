"""A part of another distribution that cannot be loaded ends no command that does not need it, and is named."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import click
import pytest
from flagcore_models.config import mixer_class
from flagcore_operators.contract import find_library, libraries
from flagcore_serving.schedules import schedule_of

from flagcore import plugins
from flagcore.cli import machine
from flagcore.errors import NoDevice
from flagcore.loading import entry_points
from flagcore.spec import models
from tests.plugins.conftest import Install, install  # noqa: F401 (a fixture)
from tests.product.cli.conftest import Flag

command_line = import_module("flagcore.cli.main")
DISTRIBUTION, NAME = "flagcore-faulty", "a_faulty_part"
FAULTS = {
    "raises": ("raise RuntimeError('broken here')", "RuntimeError: broken here"),
    "exits": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "exits with 3": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "ends the process": ("import os; os._exit(3)", "called os._exit(3)"),
    "is rude": ("raise BaseException('rude')", "BaseException: rude"),
    "interrupts": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "closes stdout": ("import sys; sys.stdout.close()", "has no attribute 'PART'"),
    "hangs": ("from threading import Event; Event().wait()", "did not end within 0.3 s"),
    "prints without end": ("while True: print('x' * 1000)", "printed more than"),
    "lacks the object": ("", "has no attribute 'PART'"),
    "is slow and of a wrong type": ("import time; time.sleep(0.02); PART = object()", "object"),
}
SOME = ("raises", "ends the process", "hangs", "is slow and of a wrong type")


def cases(groups: Iterable[str], whole: str) -> list[Any]:
    """Return groups with faults: `whole` with all, the others with some, as all are loaded alike; the rest is long."""
    return [
        pytest.param(group, fault, marks=() if group == whole or fault in SOME else pytest.mark.long)
        for group in groups
        for fault in FAULTS
    ]


def _command() -> object:
    return command_line.flag.get_command(click.Context(command_line.flag), NAME)


def _reported() -> object:
    points = entry_points.installed("flagcore.effective")[NAME]
    return entry_points.load_checked("report of knobs", points, lambda report: report())


def _scheduled() -> object:
    schedule: Any = schedule_of(NAME)
    assert schedule.refusal(None, None, None) == ""  # a trial that does not need it starts
    assert DISTRIBUTION in schedule.notes()[0]
    return schedule.scheduled(None)


NEEDS: dict[str, Callable[[], object]] = {
    "flagcore.commands": _command,
    "flagcore.effective": _reported,
    "flagcore.engines": lambda: plugins.find_engine(NAME),
    "flagcore.importers": lambda: plugins.importer(NAME),
    "flagcore.kinds": lambda: plugins.kinds()[NAME],
    "flagcore.kit": lambda: machine._kit(NAME),
    "flagcore.launchers": lambda: plugins.launcher(NAME),
    "flagcore.mixers": lambda: mixer_class(NAME),
    "flagcore.models": lambda: models.catalogue(),
    "flagcore.operators": lambda: find_library(NAME),
    "flagcore.schedules": _scheduled,
    "flagcore.sections": lambda: plugins.engines().sections([NAME]),
    "flagcore.strategies": lambda: plugins.strategy(NAME),
    "flagcore.watchers": lambda: plugins.watcher(NAME),
}
"""What needs the part of each group. Pages and overlays have others to use, and plugins are failures in a list."""
OTHERS = ("flagcore.overlays", "flagcore.pages", "flagcore.plugins", "flagcore.benchmarks", "torch.backends")
OWN_RECORDS = ("flagcore.engines", "flagcore.overlays", "flagcore.plugins", "flagcore.benchmarks", "torch.backends")
"""The groups whose parts `broken_parts` leaves out: they have records of their own, or flagcore does not load them."""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what works before the time limit of imports is short."""
    assert list(plugins.broken_parts()) == []
    assert all(plugins.kind_of(name) for name in plugins.names(plugins.ENGINES))
    assert not plugins.with_overlay(plugins.load_plugins(), lambda text: None).failures


@pytest.fixture(autouse=True)
def _new_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(command_line, "others", cache(command_line.others.__wrapped__))
    monkeypatch.setattr(models, "catalogue", models.catalogue.__wrapped__)
    yield
    plugins.kind_of.cache_clear()


@pytest.fixture
def break_parts(install: Install, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:  # noqa: F811
    """Install a distribution with a broken part in each of `groups`. The time limit of their imports becomes short."""

    def write(fault: str, *groups: str) -> None:
        monkeypatch.setattr(entry_points, "LOAD_SECONDS", 0.3)
        for number, group in enumerate(groups):
            module = f"faulty_{len(groups)}_{list(FAULTS).index(fault)}_{group.replace('.', '_')}"  # hung ones remain
            name = "catalogue" if group == "flagcore.models" else NAME
            distribution = DISTRIBUTION if len(groups) == 1 else f"{DISTRIBUTION}-{number}"
            install(distribution, {name: f"{module}:PART"}, {module: FAULTS[fault][0]}, group=group)

    return write


@pytest.mark.parametrize(("group", "fault"), cases(NEEDS, "flagcore.effective"))
def test_what_needs_a_broken_part_names_it_once_with_its_distribution(
    break_parts: Callable[..., None], monkeypatch: pytest.MonkeyPatch, group: str, fault: str
) -> None:
    break_parts(fault, group)
    if group == "flagcore.models":  # the catalogue of flagcore itself has the same name
        own = entry_points.installed(group)["catalogue"]
        monkeypatch.setattr(
            models, "installed", lambda group: {"catalogue": [each for each in own if "faulty" in each.value]}
        )
    with pytest.raises(NoDevice) as caught:
        NEEDS[group]()
    message = str(caught.value)
    assert message.count(DISTRIBUTION) == 1
    if fault != "is slow and of a wrong type":
        assert FAULTS[fault][1] in message
    assert "\n" not in message
    assert len(message) < 500
    assert ("catalogue" if group == "flagcore.models" else NAME) in message


@pytest.mark.parametrize(("group", "fault"), cases(OTHERS, "flagcore.plugins"))
def test_a_broken_part_that_nothing_needs_is_a_failure_in_the_list(
    break_parts: Callable[..., None], group: str, fault: str
) -> None:
    break_parts(fault, group)
    loaded = plugins.with_overlay(plugins.load_plugins(), lambda text: None)
    is_listed = group in ("flagcore.overlays", "flagcore.plugins")
    assert [each.distribution for each in loaded.failures] == [DISTRIBUTION] * is_listed
    assert "cpu" in [each.name for each in loaded.plugins]
    assert plugins.page_writer()


def test_doctor_names_a_part_of_a_wrong_type_of_each_group(break_parts: Callable[..., None]) -> None:
    groups = [each for each in (*NEEDS, *OTHERS) if each not in OWN_RECORDS]
    break_parts("is slow and of a wrong type", *groups)
    named = dict(plugins.broken_parts())
    clash = f"{DISTRIBUTION}-{groups.index('flagcore.models')}, flagcore-models"
    distributions = {f"{DISTRIBUTION}-{number}" for number in range(len(groups))} - {clash.partition(",")[0]} | {clash}
    assert {*named} == distributions
    assert all(f"(from {name})" in error for name, error in named.items())


@pytest.mark.parametrize("fault", ["exits", "hangs", "prints without end"])
@pytest.mark.costly
def test_no_command_ends_because_all_groups_have_a_broken_part(
    break_parts: Callable[..., None], flag: Flag, fault: str
) -> None:
    break_parts(fault, *(group for group in (*NEEDS, *OTHERS) if group != "flagcore.models"))
    shown = flag("--help").worked().out
    assert shown.replace("\n", "").count(f"{DISTRIBUTION}-0)") <= 1
    assert NAME in shown
    assert flag("import", "--help").worked().out.count(NAME) >= 1
    flag("schema").worked()
    flag("plugins", "check", "--help").worked()
    assert flag("plugins", "list", "--json").worked().out.count(f'"name": "{NAME}"') == 2  # a plugin and an overlay
    found = flag("import", "--", "vllm", "serve", "Qwen/Qwen3-8B").worked()
    assert found.err.count(f"(from {DISTRIBUTION}-2)") == 1
    flag("estimate", "--model", "Qwen/Qwen3-8B", "--engine", "megatron", "--chip", "H100", "--devices", "8").worked()
    assert flag("doctor", "--json").out.count(f"(from {DISTRIBUTION}-") == len(NEEDS)  # no catalogue, but a page
    assert [each for each in libraries() if each.name == NAME] == []
