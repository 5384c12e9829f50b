"""What changes the cost of a task and is not predicted: keys of its model, and variables of several packages."""

from dataclasses import replace
from typing import Any

import pytest
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.calibration.overlay import ExtendedPlugins

from flagcore.domain.engine import UNKNOWN, TaskAdvice, Unmodelled
from flagcore.domain.model import Attention, Layer, Model
from flagcore.domain.spec import Task
from flagcore.tuner.stages.complete import unmodelled
from tests.tasks import VISION, Service, task

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
