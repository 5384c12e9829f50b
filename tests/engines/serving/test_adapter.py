"""What the core asks of a serving workload, whichever the engine."""

from __future__ import annotations

from importlib.metadata import entry_points
from pkgutil import resolve_name

import pytest

from flagcore.domain.spec import Task
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as LLAMACPP
from flagcore.engines.serving.sglang.profile import WORKLOAD as SGLANG
from flagcore.engines.serving.vllm.profile import WORKLOAD as VLLM
from flagcore.errors import SpecError
from tests.engines.serving.engines.tasks import serving

ALL = pytest.mark.parametrize("workload", [LLAMACPP, SGLANG, VLLM], ids=lambda each: each.name)


def task_of(workload: Engine) -> Task:
    return serving(workload.name, devices=2)


@ALL
def test_empty_columns_are_the_engines_defaults(workload: Engine) -> None:
    task = task_of(workload)
    columns = workload.columns(task, {})
    decoded = {axis.knob: axis.decode(int(columns[axis.knob][0])) for axis in workload.axes(task)}
    assert decoded == dict(workload.defaults(task))
    assert all(size.shape == (1,) for size in workload.sizes(task, columns).values())


@ALL
def test_an_unknown_value_of_a_knob_is_reported(workload: Engine) -> None:
    with pytest.raises(SpecError) as refused:
        workload.columns(task_of(workload), {"kv_cache_type": "no such type"})
    assert "kv_cache_type" in refused.value.key


@ALL
def test_a_server_cannot_be_probed(workload: Engine) -> None:
    with pytest.raises(SpecError) as caught:
        workload.ready_to_probe(task_of(workload).spec)
    assert (caught.value.key, caught.value.value) == ("serve.engine", workload.name)


@ALL
def test_entry_points_lead_to_the_engine_and_its_workload(workload: Engine) -> None:
    assert resolve_name(workload.where) is workload.reports
    (found,) = entry_points(group="flagcore.engines", name=workload.name)
    assert found.load() is workload
