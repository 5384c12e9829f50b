"""A cluster of several node groups: planned, and refused where it would have to run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.api.inputs import fixed_task, open_spec
from flagcore.report.estimate import ChipPlan, Mixing, mixing_text, verdict
from tests.checks import given
from tests.product.cli.conftest import Flag, Project

LARGE = {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB", "nic_bytes_per_second": 1.0e9}
SMALL = {**LARGE, "memory_per_device": "400MiB"}
NEW, OLD = {**LARGE, "name": "new"}, {**LARGE, "name": "old", "speed": 0.25}


@pytest.fixture
def spec(project: Project) -> Callable[..., str]:
    """Write the project's spec with node groups, and without its command unless requested."""

    def write(*groups: dict[str, Any], command: bool = False, **sections: Any) -> str:
        path = Path(project.spec(**sections))
        data = yaml.safe_load(path.read_text()) | {"cluster": {"groups": list(groups)}}
        if not command:
            del data["train"]["command"]
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


@pytest.fixture
def mixing(spec: Callable[..., str]) -> Callable[..., Mixing]:
    """Return the comparison of a mixed plan with each kind alone."""

    def compared(*groups: dict[str, Any], **sections: Any) -> Mixing:
        return given(api.estimate(spec(*groups, **sections)).mixing)

    return compared


def test_a_run_belongs_to_the_layout_of_all_its_groups(spec: Callable[..., str]) -> None:
    def hardware(second: dict[str, Any]) -> object:
        return fixed_task({}, open_spec(spec(LARGE, second), None, (), plan=True).problem)["hardware"]

    assert hardware(LARGE) == hardware(SMALL)  # memory may change
    assert hardware(LARGE) != hardware({**LARGE, "nodes": 2, "devices_per_node": 1})


def test_candidates_of_a_mixed_cluster_are_listed_with_all_its_chips(flag: Flag, spec: Callable[..., str]) -> None:
    listing = flag("estimate", spec(LARGE, SMALL))
    assert "on 2 x cpu + 2 x cpu:" in listing.err
    assert "illegal: stages_in_one_group" in listing.err
    result = json.loads(flag("estimate", spec(LARGE, SMALL), "--json").out)
    plain = [each["candidate"] for each in result if not each["candidate"]["meshes"]]
    assert {each["pipeline_model_parallel_size"] % 2 for each in plain} == {0}
    assert all(each["mfu"] > 0 for each in result)


def test_a_plan_of_one_kind_is_not_called_mixed(flag: Flag, spec: Callable[..., str]) -> None:
    unknown = {**LARGE, "nic_bytes_per_second": None}  # without a network, only plans of one kind have a time
    completed = flag("estimate", spec(unknown, LARGE))
    assert "sum of single chips" not in completed.out
    assert "the network between node groups (give nic_bytes_per_second in each of cluster.groups)" in completed.err


def test_the_capacity_reported_comes_from_the_stage_with_the_least_free_memory(
    flag: Flag, spec: Callable[..., str]
) -> None:
    def memory(*groups: dict[str, Any]) -> dict[str, Any]:
        output = json.loads(flag("estimate", spec(*groups), "--explain", "baseline", "--json").out)
        found: dict[str, Any] = output["memory"]
        return found

    last, first = memory(LARGE, SMALL), memory(SMALL, LARGE)
    assert last["worst_stage"] > 0 == first["worst_stage"]
    assert last["capacity_gib"] == first["capacity_gib"] == pytest.approx(400 / 1024)


@pytest.mark.parametrize(
    ("arguments", "command", "space", "named"),
    [
        (("tune",), False, {}, ("cluster.groups", "flag estimate", "train.command")),
        (("tune",), True, {"meshes": ["cpu#1 dp2 + cpu#2 dp2"]}, ("auto_tuner.space.meshes",)),
        (("estimate", "--chip", "cpu"), False, {}, ("cluster.groups",)),
    ],
)
def test_what_a_mixed_cluster_cannot_do_is_refused(
    flag: Flag, spec: Callable[..., str], arguments: tuple[str, ...], command: bool, space: Any, named: tuple[str, ...]
) -> None:
    file = spec(LARGE, SMALL, command=command, **({"auto_tuner": {"space": space}} if space else {}))
    flag(*arguments, file).refused(2, *named)


def test_a_mixed_plan_has_the_layers_of_all_vendors_or_names_those_of_each(
    flag: Flag, spec: Callable[..., str], mixing: Callable[..., Mixing]
) -> None:
    def groups(*chips: str) -> list[dict[str, Any]]:
        return [{"chip": chip, "nodes": 1, "devices_per_node": 2, "nic_bytes_per_second": 1e10} for chip in chips]

    found = mixing(*groups("H100-SXM", "C550"))
    assert {each.implementation for each in (*found.alone, found.mixed)} == {"transformer_engine"}
    found = mixing(*groups("H100-SXM", "cpu"))
    assert {each.implementation for each in found.alone} != {found.mixed.implementation}
    assert "train.implementation" in flag("estimate", spec(*groups("H100-SXM", "cpu"))).out


def test_an_estimate_compares_splits_of_layers_and_of_data_with_each_kind_alone(
    flag: Flag, spec: Callable[..., str], mixing: Callable[..., Mixing]
) -> None:
    found = mixing(LARGE, LARGE)
    assert [each.devices for each in (found.mixed, *found.alone)] == [4, 2, 2]
    assert found.best_alone
    assert found.sum_alone == pytest.approx(2 * found.best_alone.tokens_per_second)
    assert found.idle.keys() == {"cpu#1", "cpu#2"}
    plans = [found.mixed, *found.others]
    assert {each.split for each in plans} == {"layer split", "data split"}
    assert plans[0].step_time_s <= plans[1].step_time_s
    for each in plans:
        assert ("|" in (each.candidate["meshes"] or "")) == (each.split == "data split")
    table = flag("estimate", spec(LARGE, LARGE)).out
    assert all(text in table for text in ("layer split", "data split", "sum of single chips"))
    assert "train.implementation differs" not in table
    only = mixing(LARGE, LARGE, auto_tuner={"space": {"meshes": ["cpu#1 dp2 | cpu#2 dp2"]}})
    assert only.mixed.split == "data split"
    assert all(0 <= share < 1 for share in only.idle.values())


def test_a_slower_group_has_fewer_layers_and_is_named(
    flag: Flag, spec: Callable[..., str], mixing: Callable[..., Mixing]
) -> None:
    listed = json.loads(flag("estimate", spec(NEW, OLD), "--top", "100", "--json").out)
    assert any((each["candidate"]["meshes"] or "").startswith("new") for each in listed)
    found = mixing(NEW, OLD)
    assert found.kinds == ("new", "old")
    chips = [chip for stages in found.stages for chip, _ in stages]
    assert all(sum(layers for _, layers in stages) > 1 for stages in found.stages)
    assert set(chips) == {"new", "old"}
    text = mixing_text(found, {})
    assert all(f"on {chip} (layers: {layers})" in text for stages in found.stages for chip, layers in stages)
    alone = found.alone
    assert 2.0 < alone[1].step_time_s / alone[0].step_time_s < 4.5
    assert [each.chips for each in alone] == ["new", "old"]


def test_a_mixed_plan_above_the_sum_of_its_chips_is_explained() -> None:
    names: dict[str, Any] = {"chips": "a + b", "devices": 4, "candidate": {}, "implementation": "local"}
    plan = ChipPlan(**names, tokens_per_second=1.0, step_time_s=3.0)
    mixing = Mixing(mixed=plan, idle={"a": 0.27}, limit="bubble", slowest="a")
    assert "27%" in verdict(mixing)
    alone = ChipPlan(**names, tokens_per_second=0.9, step_time_s=3.0, time={"compute_s": 2.4, "tp_comm_s": 0.6})
    kinds = (replace(alone, unlimited_tokens_per_second=rate) for rate in (0.9, 1.5))
    texts = [verdict(replace(mixing, alone=(each,))) for each in kinds]
    assert [("111%" in text, "20%" in text, "1.5" in text) for text in texts] == [(1, 1, 0), (1, 0, 1)]
    assert "111%" not in verdict(replace(mixing, alone=(alone,), unable=("c",)))
