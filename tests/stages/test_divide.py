"""Devices, cores or hosts in groups, on which trials run at once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from flagcore.contracts import Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import ClusterSpec, Control, Task
from flagcore.stages.divide import divide
from tests import small

EIGHT = tuple(Device(index=n, chip="test-chip") for n in range(8))
PARALLEL = Control(parallel_trials="auto")


def platform(devices: int = 2, *, task: Any = None, **support: Any) -> Platform:
    answer = EngineSupport(support=Support.YES, **{"visible_devices": "ACME_VISIBLE_DEVICES", **support})
    return small.platform(task or small.task(devices=devices, control=PARALLEL), support=answer)


def selected(groups: tuple[Platform, ...]) -> list[str | None]:
    return [group.task.spec.envs.get("ACME_VISIBLE_DEVICES") for group in groups]


@pytest.mark.parametrize(("devices", "count"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)])
def test_groups_are_disjoint_and_a_trial_fits_on_each(devices: int, count: int) -> None:
    groups, problem = divide(platform(devices), EIGHT)
    assert (len(groups), bool(problem)) == (count, count == 1)
    if count > 1:
        names = [name for text in selected(groups) for name in (text or "").split(",")]
        assert len(names) == len(set(names)) == count * devices


def test_devices_that_this_shell_hides_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "7, 6,5,4")
    assert selected(divide(platform(), EIGHT[4:])[0]) == ["7,6", "5,4"]


def test_trials_on_cpu_have_separate_cores() -> None:
    several = tuple(sorted(os.sched_getaffinity(0)))
    cores = tuple(replace(each, index=place) for place, each in enumerate(EIGHT[:1] * len(several)))
    groups, _ = divide(platform(1, shared_devices=True, visible_devices=None), cores)
    assert [group.cores for group in groups] == ([()] if len(several) == 1 else [(core,) for core in several])
    undivided = divide(platform(len(several) + 1, shared_devices=True, visible_devices=None), cores)
    assert (len(undivided[0]), bool(undivided[1])) == (1, True)


def serving(cards: int | None) -> Task:
    task = small.task(devices=8, control=PARALLEL)
    return replace(task, spec=replace(task.spec, work=ServeSpec(engine="llamacpp", loads=(), cards=cards)))


def test_servers_share_the_cores_of_a_cpu_with_their_load() -> None:
    assert len(divide(platform(task=serving(2), shared_devices=True), EIGHT)[0]) == 1


def test_servers_that_use_two_cards_run_side_by_side() -> None:
    assert selected(divide(platform(task=serving(2)), EIGHT)[0]) == ["0,1", "2,3", "4,5", "6,7"]
    assert len(divide(platform(task=serving(None)), EIGHT)[0]) == 1


def test_groups_of_hosts() -> None:
    task = small.task(devices=8, control=PARALLEL)
    cluster = ClusterSpec(nodes=2, hosts=("a", "b", "c", "d", "e"))
    task = replace(task, spec=replace(task.spec, cluster=cluster, launcher="ssh"))
    groups, _ = divide(platform(task=task), ())
    assert [group.task.spec.cluster.hosts for group in groups] == [("a", "b", "e"), ("c", "d")]
    spared = replace(task, spec=replace(task.spec, cluster=replace(cluster, spares=2)))
    assert len(divide(platform(task=spared), ())[0]) == 1


@pytest.mark.parametrize("control", [Control(), Control(parallel_trials=4, fidelity="probe")])
def test_trials_run_one_at_a_time_by_default_and_probes_always(control: Control) -> None:
    assert divide(platform(task=small.task(devices=2, control=control)), EIGHT)[1] == ""
    assert len(divide(platform(task=small.task(devices=2, control=control)), EIGHT)[0]) == 1
