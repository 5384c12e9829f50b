"""What a plan assumes: the settings of recipes, each for the candidates with which it is legal."""

import shlex
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.space import production
from flagcore_megatron.space.meshes import CP, MESHES, TP

from engines.megatron.tests.mixed.test_brute_force import job
from engines.models.tests.examples import layer_of
from flagcore.contracts import Platform
from flagcore.domain.chip import Source
from flagcore.domain.engine import RefusedValues, Stack
from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import SettingValue, Task
from flagcore.tuner.stages.build import build, legality
from tests.product import tasks

CHIP = tasks.chip(bf16=9e14, fp8=2e15)
TWO_TOKENS = replace(tasks.EXPERTS, mtp_num_layers=1)
SPACE = {
    "micro_batch_size": (1,),
    "context_parallel_size": (1, 2),
    "recompute_num_layers": (1,),
    "layer_split": (None,),
}
OVERLAP = "overlap_moe_expert_parallel_comm"


def platform(model: Model = tasks.DENSE, *refused: RefusedValues, own: Any = (), **job: Any) -> Platform:
    """The platform of a spec before anything is assumed, on a chip whose vendor names transformer-engine."""
    source = Source(kind="datasheet", detail="a guide")
    stack = Stack(implementation="transformer_engine", settings=dict(own), source=source)
    found = tasks.platform(tasks.task(model, chip=CHIP, **{"space": SPACE, **job}))
    return replace(found, support=replace(found.support, stack=stack), value_rules=tuple(refused))


def plan(model: Model = tasks.DENSE, *refused: RefusedValues, **job: Any) -> Task:
    return production.as_in_production(platform(model, *refused, **job)).task


def assumed(model: Model = tasks.DENSE, *refused: RefusedValues, **job: Any) -> dict[str, SettingValue]:
    return dict(plan(model, *refused, **job).spec.train.assumed)


def typed(task: Task, settings: dict[str, SettingValue]) -> Task:
    """A task in which a user wrote these settings."""
    return replace(task, spec=replace(task.spec, work=replace(task.spec.train, settings=settings, assumed={})))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [tasks.DENSE, tasks.EXPERTS, TWO_TOKENS], ids=["dense", "experts", "mtp"])
@pytest.mark.parametrize("own", [{}, {"cuda_graph_impl": "transformer_engine"}], ids=["plain", "graphs"])
def test_each_candidate_is_predicted_with_the_settings_that_are_legal_with_it(
    own: dict[str, str], model: Model, precision: str
) -> None:
    task = plan(model, precision=precision, own=own)
    legal = legality(tasks.platform(task))
    space = build(legal.axes, legal.rules, legal.merges)
    bare = legality(tasks.platform(typed(task, {"expert_tensor_parallel_size": 1} if model.num_moe_experts else {})))
    assert len(space) == len(build(bare.axes, bare.rules, bare.merges))
    costs, everything = platform(model).costs, np.arange(len(space))
    found = ENGINE.predict(task, space.columns(everything), costs)
    kinds: dict[tuple[tuple[str, SettingValue], ...], list[int]] = defaultdict(list)
    for row in everything:
        kinds[tuple(ENGINE.plans.assumed(task, space.candidate(int(row))).items())].append(int(row))
    assert len(kinds) > 2
    for settings, some in kinds.items():
        strict, columns = typed(task, dict(settings)), space.columns(np.array(some))
        assert not any(rule.broken(columns).any() for rule in legality(tasks.platform(strict)).rules)
        single = ENGINE.predict(strict, columns, costs)
        np.testing.assert_allclose(found.step_time_s[some], single.step_time_s)
        np.testing.assert_allclose(found.static_bytes[some], single.static_bytes)
        np.testing.assert_allclose(found.activation_bytes[some], single.activation_bytes)


def test_a_named_setting_takes_precedence_over_contradicting_notes() -> None:
    fused_loss = {"cross_entropy_loss_fusion", "cross_entropy_fusion_impl"}
    assert assumed(settings={"overlap_grad_reduce": False}).keys() == {"tp_comm_overlap"} | fused_loss
    found = assumed(tasks.EXPERTS, settings={"moe_grouped_gemm": False, "moe_shared_expert_overlap": True})
    assert not found.keys() & {"moe_grouped_gemm", "moe_token_dispatcher_type", "recompute_modules"}
    assert OVERLAP not in assumed(tasks.EXPERTS, space={**SPACE, OVERLAP: (False, True)})


def test_settings_that_the_chip_or_the_release_lacks_are_left_out() -> None:
    flex = RefusedValues(name="no_link", knob="settings.moe_token_dispatcher_type", values=("flex",), reason="no link")
    assert "moe_token_dispatcher_type" not in assumed(tasks.EXPERTS, flex)
    assert OVERLAP not in assumed(tasks.EXPERTS, engine_version="0.12.0")
    alltoall = {"tp_comm_overlap": False, "moe_token_dispatcher_type": "alltoall", "recompute_modules": None}
    assert assumed(tasks.EXPERTS, own=alltoall).items() >= {"moe_token_dispatcher_type": "alltoall"}.items()
    assert not assumed(tasks.EXPERTS, own=alltoall).keys() & {"recompute_modules", "tp_comm_overlap"}
    assert not assumed(own=alltoall).keys() & alltoall.keys()
    none = RefusedValues(name="old", knob="implementation", values=("transformer_engine",), reason="too old")
    assert plan(tasks.EXPERTS, none).spec.train.implementation is None


def test_graphs_of_a_model_with_experts_leave_the_experts_out() -> None:
    own = {"cuda_graph_impl": "transformer_engine"}
    scope = str(assumed(tasks.EXPERTS, own=own)["cuda_graph_scope"]).split(",")
    assert "attn" in scope
    assert "moe" not in scope
    assert "cuda_graph_scope" not in {**assumed(own=own), **assumed(tasks.EXPERTS)}


def test_a_model_with_a_pattern_of_layers_does_not_overlap_its_experts() -> None:
    layers = (layer_of(tasks.EXPERTS), layer_of(tasks.EXPERTS, None, "experts")) * 2
    hybrid = replace(tasks.EXPERTS, layers=layers)
    assert OVERLAP in assumed(tasks.EXPERTS)
    assert OVERLAP not in assumed(hybrid)
    task = tasks.task(hybrid, settings={OVERLAP: True})
    assert OVERLAP in {rule.name for rule in legality(tasks.platform(task)).rules}


def test_naming_the_layers_that_are_assumed_changes_nothing() -> None:
    named = plan(tasks.EXPERTS, implementation="transformer_engine").spec
    assert named == plan(tasks.EXPERTS).spec
    assert named.train.assumed


@pytest.mark.parametrize("job", [{"command": ("pretrain_gpt.py",)}, {"implementation": "local"}])
def test_a_spec_that_names_its_settings_is_unchanged(job: dict[str, Any]) -> None:
    arguments = platform(**job)
    assert production.as_in_production(arguments) is arguments


def test_the_command_of_a_plan_has_the_assumed_flags_that_are_legal(tmp_path: Path) -> None:
    arguments = production.as_in_production(platform(tasks.EXPERTS, precision="fp8"))
    neutral = {axis.knob: axis.neutral for axis in legality(tasks.platform(arguments.task)).axes}
    knobs = {**neutral, "expert_model_parallel_size": 4}
    shards = {"data_parallel_size": 4, "use_distributed_optimizer": True}
    plain = {**knobs, "data_parallel_size": 4, "use_recompute": True, "recompute_granularity": "full"}

    def flags(values: dict[str, Any]) -> set[str]:
        launch = ENGINE.launch(arguments, Candidate.of(values), str(tmp_path), for_real=True)
        return set(shlex.split(shlex.join(launch.argv)))

    gated = {"--overlap-param-gather", "--fp8-param-gather", "--overlap-moe-expert-parallel-comm"}
    always = {"--moe-grouped-gemm", "--overlap-grad-reduce", "--fp8-recipe", "--transformer-impl"}
    assert flags({**knobs, **shards}) >= gated | always
    assert flags(plain) >= always
    assert not flags(plain) & gated


@pytest.mark.parametrize(
    ("knobs", "count"), [({}, 0), ({TP: 8, CP: 2}, 0.2), ({TP: 16}, 2.1), ({CP: 4}, 5.1), ({TP: 16, CP: 4}, 7.2)]
)
def test_tp_over_nodes_and_short_context_parallel_ranks_are_unusual(knobs: dict[str, int], count: float) -> None:
    task = tasks.task(devices=8, seq_length=8192)
    columns = ENGINE.columns(task, knobs)
    predictions = ENGINE.predict(task, columns, tasks.costs(task))
    assert ENGINE.plans.unusual(task, columns, predictions) == pytest.approx([count])


def test_short_context_parallel_ranks_of_a_mesh_are_unusual() -> None:
    texts = ("fast cp2 dp2 + slow dp4", "fast cp4 | slow dp4", "fast dp4 | slow dp4")
    task, costs = job(2, *texts, devices=4, model=tasks.DENSE)  # 4,096 tokens
    columns = [ENGINE.columns(task, {MESHES: text}) for text in (*texts, None)]
    weights = [ENGINE.plans.unusual(task, each, ENGINE.predict(task, each, costs)) for each in columns]
    assert np.concatenate(weights) == pytest.approx([5.1, 5.1, 0, 0])
