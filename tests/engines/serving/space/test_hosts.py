"""Instances on several hosts: where each is, what is illegal, and the flags of each host."""

from dataclasses import replace
from typing import Any

import pytest

from flagcore.domain.cluster import Cluster
from flagcore.domain.spec import Task
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as LLAMACPP
from flagcore.engines.serving.sglang.profile import WORKLOAD as SGLANG
from flagcore.engines.serving.space.hardware import Hardware
from flagcore.engines.serving.space.placement import placements
from flagcore.engines.serving.vllm.profile import WORKLOAD as VLLM
from flagcore.errors import SpecError
from tests.engines.serving.engines.tasks import broken, serving

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def task_on_hosts(engine: str = "vllm", hosts: int = 2, **arguments: Any) -> Task:
    """A task on hosts with four devices each."""
    task = serving(engine, devices=4, **arguments)
    (group,) = task.cluster.groups
    return replace(task, cluster=Cluster(groups=(replace(group, nodes=hosts),)))


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ({"instances": 2, TP: 4}, [(range(1), 0), (range(1, 2), 0)]),
        ({"instances": 3, TP: 2}, [(range(1), 0), (range(1), 2), (range(1, 2), 0)]),
        ({"instances": 1, TP: 8}, [(range(2), 0)]),
        ({"instances": 1, TP: 4, PP: 2}, [(range(2), 0)]),
    ],
)
def test_an_instance_is_on_the_first_host_with_room(values: dict[str, Any], places: list[tuple[range, int]]) -> None:
    assert [(each.hosts, each.first) for each in placements(task_on_hosts(), values)] == places


def test_cores_of_an_instance_come_from_one_host() -> None:
    task = task_on_hosts("llamacpp", on_cores=True)
    assert [(each.hosts[0], each.width) for each in placements(task, {"instances": 1})] == [(0, 4)]
    assert [(each.hosts[0], each.width) for each in placements(task, {"instances": 3})] == [(0, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("engine", "values", "legal"),
    [
        (VLLM, {"instances": 2, TP: 4}, True),
        (VLLM, {"instances": 1, TP: 8}, True),
        (VLLM, {"instances": 2, TP: 1, PP: 3}, True),
        (VLLM, {"instances": 1, TP: 1, PP: 6}, False),
        (SGLANG, {"instances": 1, TP: 4, PP: 2}, True),
        (LLAMACPP, {"instances": 1, PP: 8}, False),
        (LLAMACPP, {"instances": 2, PP: 4}, True),
    ],
)
def test_an_instance_fits_on_a_host_or_has_whole_hosts(engine: Any, values: dict[str, Any], legal: bool) -> None:
    rules = broken(engine, task_on_hosts(engine.name), **values)
    assert ("hosts" not in rules) == legal, rules


def test_each_host_of_an_instance_has_its_own_flags() -> None:
    assert VLLM.on_host(2, 0)[:4] == ("--nnodes", "2", "--node-rank", "0")
    assert "--headless" not in VLLM.on_host(2, 0)
    assert VLLM.on_host(2, 1)[-1] == "--headless"
    assert SGLANG.on_host(2, 1) == ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "{head}:{head_port}")


def test_cards_come_from_the_spec_or_the_cluster_and_must_exist() -> None:
    assert not Hardware.of(serving("vllm")).on_cores
    assert Hardware.of(serving("vllm", on_cores=True)).on_cores
    assert Hardware.of(serving("vllm", devices=8)).cards == 8
    with pytest.raises(SpecError) as error:
        Hardware.of(serving("vllm", devices=8, cards=9))
    assert (error.value.key, error.value.value) == ("auto_tuner.cards", 9)
    assert Hardware.of(serving("vllm", devices=8, cards=6)).cards == 6
