"""Classes of settings: what is named, how wide its interval is, and settings of models and of common software."""

from dataclasses import replace
from typing import Any

import pytest
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.calibration.overlay import ExtendedPlugins
from flagcore_vendorkit.settings import UNKNOWN_TIME, Cost, Settings

from flagcore.domain.engine import UNKNOWN, TaskAdvice, Unmodelled
from flagcore.domain.model import Attention, Layer, Model
from flagcore.domain.spec import Task
from flagcore.tuner.stages.complete import unmodelled
from tests.tasks import VISION, Service, task

SLOWER = Cost(why="slower", time=(1.0, 1.5), source="a page")
CLASSES = Settings(
    prefixes="TOY_",
    modelled="depth",
    harmless="port log-* TOY_LOG* cache.quiet",
    costs={
        "adapters": SLOWER,
        "no-graphs": SLOWER,
        "cache": SLOWER,
        "lists names": Cost(why="faster", time=(0.9, 1.0), unless=("two", "1e9")),
        "lists.four": SLOWER,
        "limit=32 share=0.5 switch=true": SLOWER,
        "TOY_RAW": Cost(why="other kernels", unless=("1",)),
    },
)


@pytest.mark.parametrize(
    ("name", "value", "time"),
    [
        ("depth", 3, None),
        ("port", 8000, None),
        ("log-level", "info", None),
        ("log_level", "info", None),
        ("adapters", True, (1.0, 1.5)),
        ("adapters", False, None),
        ("adapters", "0", None),
        ("adapters", None, None),
        ("adapters.rank", 16, (1.0, 1.5)),
        ("cache.size", 4, (1.0, 1.5)),
        ("cache.quiet", True, None),
        ("graphs", False, (1.0, 1.5)),
        ("no-graphs", True, (1.0, 1.5)),
        ("no-adapters", True, None),
        ("no-log-level", True, None),
        ("lists", "two", None),
        ("lists", "three", (0.9, 1.0)),
        ("lists", "Four", (1.0, 1.5)),
        ("names", "three", (0.9, 1.0)),
        ("names", 1_000_000_000, None),
        ("limit", 32, None),
        ("limit", 0, (1.0, 1.5)),
        ("limit", "0.5", (1.0, 1.5)),
        ("share", "0.50", None),
        ("share", "auto", None),
        ("switch", "1", None),
        ("switch", "off", (1.0, 1.5)),
        ("no-strange", True, UNKNOWN_TIME),
        ("strange", 1, UNKNOWN_TIME),
    ],
)
def test_a_setting_that_predictions_leave_out_is_named_with_its_interval(
    name: str, value: object, time: tuple[float, float] | None
) -> None:
    found = CLASSES.unmodelled(name, value)
    assert (found and found.time) == time


def test_the_source_of_an_effect_and_the_words_of_the_user_are_named() -> None:
    found = CLASSES.unmodelled("adapters", True, "--adapters")
    assert found is not None
    assert "--adapters" in str(found)
    assert "slower (a page)" in str(found)


def test_variables_of_other_software_have_no_effect() -> None:
    job = replace(task().spec, envs={"TOY_RAW": "0", "TOY_LOG_LEVEL": "info", "TOY_NEW": "x", "HOME": "/root"})
    assert [each.name for each in CLASSES.of_environment(job)] == ["TOY_RAW", "TOY_NEW"]
    assert not [*CLASSES.of_environment(replace(job, envs={"TOY_RAW": "1"}))]


def test_a_default_elsewhere_is_named_if_predictions_assume_another_value() -> None:
    job = replace(task().spec, envs={"TOY_RAW": "1"})
    for usual, named in (({}, []), ({"TOY_RAW": "1"}, []), ({"TOY_RAW": "2"}, ["TOY_RAW"])):
        assert [each.name for each in CLASSES.of_environment(job, usual)] == named
        assert [*CLASSES.harmless_in(job, usual)] == ([] if named else ["TOY_RAW"])


def test_names_without_a_class_are_listed() -> None:
    assert CLASSES.unclassed(["depth", "cache.size", "no-adapters", "log-file", "strange"]) == ["strange"]


@pytest.mark.parametrize("time", [(1.1, 1.5), (0.5, 0.9), (0.0, 1.0)])
def test_the_bounds_of_a_factor_are_around_one(time: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="around 1"):
        Cost(why="slower", time=time)


PLUGINS = ExtendedPlugins((), print)


def named(job: Task, **advice: Any) -> dict[str, str]:
    return {each.name: each.why for each in unmodelled(job, ENGINE, PLUGINS, TaskAdvice(**advice))}


def with_model(job: Task, **fields: Any) -> Task:
    model: Model = replace(job.spec.model, **fields)
    return replace(job, spec=replace(job.spec, model=model))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"unread": (("torch_dtype", "bfloat16"), ("text_config.rope_theta", "1e6"))}, []),
        ({"unread": (("n_group", "1"), ("quantization_config.quant_method", "fp8"))}, []),
        ({"unread": (("n_group", "8"), ("strange", "1"))}, ["model.n_group", "model.strange"]),
        ({"unread": (("text_config.attn_pdrop", "0.1"),)}, ["model.text_config.attn_pdrop"]),
        ({"unread": (("vision_config", "{}"),), "vision": VISION}, ["model.vision_config"]),
        ({"layers": (Layer(mixer=Attention(window=8)),)}, []),
    ],
)
def test_keys_of_a_model_that_change_the_cost_of_training_are_named(fields: dict[str, Any], names: list[str]) -> None:
    assert sorted(named(with_model(task(), **fields))) == names


def test_a_vision_tower_that_serving_predicts_is_not_named() -> None:
    job = with_model(task(), unread=(("vision_config", "{}"),), vision=VISION)
    job = replace(job, spec=replace(job.spec, work=Service(engine="toy")))
    assert not named(job)


def test_what_an_engine_does_not_load_is_not_named() -> None:
    job = with_model(task(), unread=(("vision_config", "{}"),))
    assert not named(job, unmodelled=(Unmodelled(name="model.vision_config", why=""),))


def test_the_word_of_a_plugin_on_a_variable_decides() -> None:
    job = task()
    job = replace(job, spec=replace(job.spec, envs={"TORCH_A": "1", "TORCH_B": "1", "TRITON_DEBUG": "1", "OMP_C": "1"}))
    found = named(job, unmodelled=(Unmodelled(name="TORCH_A", why="slower"),), harmless=("TORCH_B", "TRITON_DEBUG"))
    assert found == {"TORCH_A": "slower", "OMP_C": UNKNOWN}
