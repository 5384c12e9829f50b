"""Engines, launchers and strategies come through the same door as a stranger's."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from flagcore import plugins
from flagcore.contracts import Engine
from flagcore.errors import NoDevice, SpecError
from flagcore.plugins import ENGINES, STRATEGIES, find_engine, strategy
from flagcore.tuner.stages.complete import engine_version
from tests import tasks
from tests.checks import refuses

Install = Callable[..., None]

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
    monkeypatch.setattr("flagcore.plugins.entry_points.requires", lambda name: [])  # whatever is missing here
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
    monkeypatch.setattr("flagcore.plugins.entry_points.requires", lambda name: needs)
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


@pytest.mark.parametrize(
    ("find", "distribution"), [(plugins.command_reader, "flagcore-importers"), (plugins.page_writer, "flagcore-page")]
)
def test_without_a_reader_or_a_page_its_distribution_is_named(
    monkeypatch: pytest.MonkeyPatch, find: Callable[[], object], distribution: str
) -> None:
    monkeypatch.setattr("flagcore.plugins.entry_points.names", lambda group: ())
    with pytest.raises(NoDevice, match=distribution):
        find()
