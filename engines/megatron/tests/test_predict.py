"""From knob columns to predictions; which candidates need or take at least as much as another; a model's weights."""

import dataclasses
import random

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.predict import components, layout_of, predict, rank_figures, training
from flagcore_megatron.space.knobs import candidate_columns
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.dense import Dense
from flagcore_training.schedules import SCHEDULES

from engines.training.tests.simulation import LLAMA, step_seconds
from flagcore.contracts import Costs
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Layer, Model
from flagcore.domain.prediction import components_of_row
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import SettingValue, Task
from flagcore.physics.roofline import PlainMemory
from flagcore.tuner.stages.build import build
from tests.product import tasks

DENSE = dataclasses.replace(
    LLAMA, num_layers=16, hidden_size=2048, ffn_hidden_size=5632, num_attention_heads=16, num_query_groups=8
)
EXPERTS = dataclasses.replace(DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=1408)
PIPELINE = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s", "pp_bubble_s", "pp_comm_s")
PARTS = (*PIPELINE, "dp_comm_exposed_s", "optimizer_s")


def task(model: Model = DENSE, chip: Chip = tasks.CHIP, nodes: int = 1, **settings: SettingValue) -> Task:
    found = tasks.task(model, seq_length=4096, global_batch_size=64, settings=settings)
    group = NodeGroup(chip=chip, nodes=nodes, devices_per_node=8 // nodes)
    return dataclasses.replace(found, cluster=Cluster(groups=(group,)))


def costs(chip: Chip = tasks.CHIP, capacity: float | None = 80e9) -> Costs:
    return tasks.costs(task(chip=chip), capacity)


def columns(**knobs: list[int]) -> dict[str, np.ndarray]:
    rows = max((len(values) for values in knobs.values()), default=1)
    base = {knob: np.repeat(values, rows) for knob, values in candidate_columns({}).items()}
    return base | {knob: np.array(values) for knob, values in knobs.items()}


MANY = columns(
    data_parallel_size=[8, 4, 4, 2, 4, 1, 2],
    tensor_model_parallel_size=[1, 2, 1, 2, 1, 8, 1],
    pipeline_model_parallel_size=[1, 1, 2, 2, 1, 1, 4],
    context_parallel_size=[1, 1, 1, 1, 2, 1, 1],
    sequence_parallel=[0, 1, 0, 1, 0, 1, 0],
    num_layers_per_virtual_pipeline_stage=[0, 0, 4, 0, 0, 0, 2],
)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=lambda model: model.name + str(model.num_moe_experts))
def test_parts_of_the_time_add_up_to_the_step(model: Model) -> None:
    found = predict(task(model), MANY, costs())
    assert tuple(found.time_s) == PARTS
    np.testing.assert_allclose(sum(found.time_s.values()), found.step_time_s)
    assert (found.low_s < found.step_time_s).all()
    assert (found.step_time_s < found.high_s).all()


def test_runs_that_wait_for_launches_and_unmeasured_chips_have_wider_intervals() -> None:
    rows = columns(micro_batch_size=[1, 64], tensor_model_parallel_size=[8, 8], sequence_parallel=[1, 1])
    known, guessed = (
        predict(task(EXPERTS), rows, dataclasses.replace(costs(), guessed=each)) for each in (False, True)
    )
    for found in (known, guessed):
        assert (found.high_s / found.step_time_s)[0] > 1.1 * (found.high_s / found.step_time_s)[1]
    assert (guessed.high_s > known.high_s).all()
    assert (guessed.low_s < known.low_s).all()
    graphs = predict(task(EXPERTS, cuda_graph_impl="full_iteration"), rows, costs())
    np.testing.assert_allclose(graphs.high_s / graphs.step_time_s, 1.2)


def test_time_lies_above_the_peak_rate_and_within_reason() -> None:
    found = predict(task(), MANY, costs())
    share = found.model_flops / (found.step_time_s * 8 * 900e12)
    assert (share > 0.03).all()
    assert (share < 0.82).all()


def test_each_communicator_of_a_layout_takes_its_buffers() -> None:
    memory = PlainMemory(capacity=80e9, communicator=1e9)
    made = (costs(), dataclasses.replace(costs(), memory=memory))
    experts = columns(data_parallel_size=[8], expert_model_parallel_size=[4])
    # all ranks, and each of TP, CP, DP with CP, PP and EP that has several ranks
    for model, rows, number in ((DENSE, MANY, [2, 3, 3, 4, 3, 2, 3]), (EXPERTS, experts, [4])):
        without, used = (predict(task(model), rows, each).device_used_bytes for each in made)
        np.testing.assert_allclose((used - without) / 1e9, number)
    wide = dataclasses.replace(costs(), memory=PlainMemory(capacity=80e9, further=(1e9, 1e10)))
    used = predict(task(EXPERTS, nodes=2), columns(tensor_model_parallel_size=[2], data_parallel_size=[4]), wide)
    near = predict(task(EXPERTS), columns(tensor_model_parallel_size=[2], data_parallel_size=[4]), wide)
    np.testing.assert_allclose(used.device_used_bytes - near.device_used_bytes, 2e10)  # all ranks, and the replicas
    rows = columns(tensor_model_parallel_size=[2], data_parallel_size=[4])
    alone = [rank_figures(task(EXPERTS, nodes=2), rows, 0, each).device_used_bytes for each in (wide, costs())]
    assert alone[0] == alone[1]


@pytest.mark.parametrize(("overlap", "share"), [(False, 0.040), (True, 0.133)])
def test_blocks_of_experts_are_reserved_up_to_the_limit(overlap: bool, share: float) -> None:
    job = task(EXPERTS, overlap_moe_expert_parallel_comm=overlap)
    rows = columns(expert_model_parallel_size=[4])
    used = predict(job, rows, costs()).device_used_bytes[0]
    full, ample = (predict(job, rows, costs(capacity=each)) for each in (used - 1.0, 1e15))
    assert ample.reserved_bytes[0] == pytest.approx((1.0 + share) * ample.peak_allocated_bytes[0], rel=1e-3)
    assert full.device_used_bytes[0] == pytest.approx(used - 1.0)
    plain = predict(task(), rows, costs())
    assert plain.reserved_bytes[0] < 1.02 * plain.peak_allocated_bytes[0]


def test_each_layout_pays_for_its_own_traffic_only() -> None:
    found = predict(task(), MANY, costs()).time_s
    np.testing.assert_array_equal(found["tp_comm_s"] > 0, MANY["tensor_model_parallel_size"] > 1)
    np.testing.assert_array_equal(found["cp_comm_s"] > 0, MANY["context_parallel_size"] > 1)
    np.testing.assert_array_equal(found["pp_bubble_s"] > 0, MANY["pipeline_model_parallel_size"] > 1)
    np.testing.assert_array_equal(found["pp_comm_s"] > 0, MANY["pipeline_model_parallel_size"] > 1)
    assert (found["ep_comm_s"] == 0).all()
    assert (predict(task(EXPERTS), columns(expert_model_parallel_size=[4]), costs()).time_s["ep_comm_s"] > 0).all()


def test_an_unknown_rate_leaves_the_time_out_and_keeps_the_memory() -> None:
    bare = Chip(name="bare", vendor="test")
    row = predict(task(chip=bare), columns(), costs(bare, capacity=None)).row(0)
    assert row.step_time_s is None
    assert row.fits is None
    assert row.peak_allocated_bytes > row.static_bytes > 0


def test_rows_are_independent() -> None:
    found = predict(task(), {knob: np.tile(values, 3000) for knob, values in MANY.items()}, costs())
    assert found.worst_stage.shape == (21000,)
    for row in range(7):
        one = predict(task(), {knob: values[[row]] for knob, values in MANY.items()}, costs())
        assert set(found.step_time_s[row::7]) == {*one.step_time_s}
        assert set(found.peak_allocated_bytes[row::7]) == {*one.peak_allocated_bytes}


def test_no_rows_give_no_predictions() -> None:
    empty = {knob: values[:0] for knob, values in MANY.items()}
    assert predict(task(), empty, costs()).step_time_s.size == 0


def test_expert_tensor_parallel_is_the_tensor_parallel_size_unless_given() -> None:
    shared = {"tensor_model_parallel_size": [4, 4], "sequence_parallel": [1, 1], "expert_model_parallel_size": [2, 2]}
    default = predict(task(EXPERTS), columns(**shared), costs()).static_bytes
    arguments = predict(task(EXPERTS), columns(**shared, expert_tensor_parallel_size=[4, 1]), costs()).static_bytes
    assert arguments[0] == default[0]
    assert arguments[1] > default[1]


def test_components_come_from_the_worst_stage() -> None:
    values = {"pipeline_model_parallel_size": 4, "data_parallel_size": 2, "expert_model_parallel_size": 2}
    found = predict(task(EXPERTS), columns(**{knob: [value] for knob, value in values.items()}), costs())
    table = components_of_row(components(task(EXPERTS), candidate_columns(values), found.worst_stage, costs()), 0)
    row = found.row(0)
    assert row.worst_stage == 0
    assert table["experts"]["params"] == 4 * 4 * 3 * 2048 * 1408
    assert table["router"]["params"] == 4 * 2048 * 8
    assert "output_head" not in table
    states = ("weights_bytes", "gradients_bytes", "main_params_bytes", "optimizer_bytes")
    assert sum(part[name] for part in table.values() for name in states) == pytest.approx(row.static_bytes, rel=1e-12)
    assert sum(part["activation_bytes"] for part in table.values()) == pytest.approx(row.activation_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "matrix_bytes", "embedding_bytes"), [(None, 8, 8), ("adam", 8, 8), ("sgd", 4, 4), ("muon", 4, 8)]
)
def test_optimizers_store_their_moments(optimizer: str | None, matrix_bytes: int, embedding_bytes: int) -> None:
    job = tasks.task(settings={"optimizer": optimizer} if optimizer else {}, precision="bf16")
    table = components_of_row(components(job, candidate_columns({}), np.zeros(1, dtype=np.int64), tasks.costs(job)), 0)
    for name, expected in (("ffn", matrix_bytes), ("embedding", embedding_bytes)):
        assert table[name]["optimizer_bytes"] == expected * table[name]["params"]


@pytest.mark.parametrize(("optimizer", "is_sharded"), [("muon", False), ("dist_muon", True)])
def test_the_layer_wise_optimizer_of_muon_shards_its_states(optimizer: str, is_sharded: bool) -> None:
    layout = layout_of(tasks.task(settings={"optimizer": optimizer}), candidate_columns({"data_parallel_size": 4}))
    assert bool(layout.sharded_optimizer[0]) is is_sharded


@pytest.mark.parametrize(("release", "replicas"), [("0.18.2", 4), ("0.19.0", 8), (None, 8)])
def test_experts_that_are_not_split_have_groups_of_their_own_since_0_19(release: str | None, replicas: int) -> None:
    job = tasks.task(tasks.EXPERTS, devices=8, engine_version=release, settings={"expert_tensor_parallel_size": 1})
    found = layout_of(job, candidate_columns({"data_parallel_size": 4, "tensor_model_parallel_size": 2}))
    assert found.expert_replicas().tolist() == [replicas]


@pytest.mark.parametrize(
    ("settings", "release", "found"),
    [
        ({}, "0.16.1", {"frees_mtp_logits": False, "stores_core_copy": True, "whole_matrices": False}),
        ({}, "0.18.0", {"frees_mtp_logits": True, "stores_core_copy": False, "whole_matrices": False}),
        ({"cp_comm_type": "a2a"}, "0.19.0", {"stores_core_copy": True}),
        ({"optimizer": "muon"}, "0.17.0", {"whole_matrices": False}),
        ({"optimizer": "muon"}, "0.18.0", {"whole_matrices": True}),
        ({"cross_entropy_loss_fusion": True}, None, {"in_place_loss": False, "copied_loss": True}),
        (
            {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
            None,
            {"in_place_loss": True, "copied_loss": False},
        ),
        ({"cross_entropy_fusion_impl": "te"}, None, {"in_place_loss": False, "copied_loss": False}),
    ],
)
def test_what_a_release_keeps_depends_on_it(
    settings: dict[str, SettingValue], release: str | None, found: dict[str, bool]
) -> None:
    options = training(tasks.task(engine_version=release, settings={"cp_comm_type": "all_gather", **settings})).options
    assert {name: getattr(options, name) for name in found} == found


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("interleaved", 2), *((name, 1) for name in SCHEDULES if name != "1f1b")]
)
def test_passes_of_a_candidate_make_up_its_predicted_step(schedule: str, virtual: int) -> None:
    settings = {} if schedule == "interleaved" else {"pipeline_schedule": schedule}
    model = dataclasses.replace(tasks.EXPERTS, num_layers=8)
    job = tasks.task(model, devices=4, settings=settings, global_batch_size=16)
    knobs = {"pipeline_model_parallel_size": 4, "micro_batch_size": 1}
    row = ENGINE.columns(job, {**knobs, "num_layers_per_virtual_pipeline_stage": 1 if virtual > 1 else None})
    (passes,) = ENGINE.plans.pipelines(job, row, tasks.costs(job))
    assert (passes.schedule, passes.microbatches, passes.virtual) == (schedule, 16, virtual)
    assert bool(passes.paired_s) is schedule.startswith("dualpipe")
    step = ENGINE.predict(job, row, tasks.costs(job)).time_s
    pipeline_s = sum(float(step[name][0]) for name in PIPELINE)
    assert passes.predicted_s == pytest.approx(pipeline_s, rel=1e-6)
    if schedule in ("gpipe", "interleaved", "zb-h1", "zb-h2"):
        assert step_seconds(passes) == pytest.approx(pipeline_s, rel=0.035)


DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP, MBS = "context_parallel_size", "expert_model_parallel_size", "micro_batch_size"
LAYERS, SHARDED = "recompute_num_layers", "use_distributed_optimizer"
FULL: dict[str, KnobValue] = {"use_recompute": True, "recompute_granularity": "full"}
UNIFORM = {**FULL, "recompute_method": "uniform", LAYERS: 1}
BLOCK = {**FULL, "recompute_method": "block"}
SELECTIVE: dict[str, KnobValue] = {"use_recompute": True, "recompute_granularity": "selective"}

MORE_MEMORY: dict[str, tuple[dict[str, KnobValue], dict[str, KnobValue]]] = {
    "a larger micro batch": ({MBS: 4}, {MBS: 2}),
    "no sequence parallelism": ({TP: 2}, {TP: 2, "sequence_parallel": True}),
    "an optimizer that is not sharded": ({}, {SHARDED: True}),
    "no recompute": ({}, UNIFORM),
    "no recompute instead of selective": ({}, SELECTIVE),
    "fewer layers by block": ({**BLOCK, LAYERS: 1}, {**BLOCK, LAYERS: 2}),
    "all of it": ({MBS: 2}, {**UNIFORM, SHARDED: True}),
}


@pytest.mark.parametrize("name", MORE_MEMORY)
def test_candidates_that_need_at_least_as_much_memory_are_found(name: str) -> None:
    more, less = MORE_MEMORY[name]
    assert ENGINE.needs_at_least(candidate_columns(more), tasks.candidate(**less)).tolist() == [True]
    assert ENGINE.needs_at_least(candidate_columns(less), tasks.candidate(**more)).tolist() == [False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({TP: 2}, {TP: 4}),
        ({DP: 2}, {DP: 4}),
        ({PP: 2}, {PP: 4}),
        ({CP: 2}, {CP: 4}),
        ({EP: 2}, {EP: 4}),
        ({"num_layers_per_virtual_pipeline_stage": 1, PP: 2}, {PP: 2}),
        (UNIFORM, {**BLOCK, LAYERS: 2}),
        (UNIFORM, {**UNIFORM, LAYERS: 2}),
        (SELECTIVE, UNIFORM),
        (SELECTIVE, {**BLOCK, LAYERS: 1}),
        ({MBS: 2}, {SHARDED: False, MBS: 4, **UNIFORM}),
    ],
)
def test_other_differences_give_no_conclusion(one: dict[str, KnobValue], other: dict[str, KnobValue]) -> None:
    for row, than in ((one, other), (other, one)):
        assert not ENGINE.needs_at_least(candidate_columns(row), tasks.candidate(**than)).any()


def test_only_candidates_with_more_recompute_take_at_least_as_long() -> None:
    plain = tasks.candidate()
    assert ENGINE.takes_at_least(candidate_columns(UNIFORM), plain).all()
    assert ENGINE.takes_at_least(candidate_columns(SELECTIVE), plain).all()
    assert not ENGINE.takes_at_least(candidate_columns({}), tasks.candidate(**UNIFORM)).any()
    assert not ENGINE.takes_at_least(candidate_columns({MBS: 2}), plain).any()
    assert not ENGINE.takes_at_least(candidate_columns({SHARDED: True}), plain).any()


@pytest.mark.parametrize("seed", range(6))
def test_the_model_never_contradicts_the_order(seed: int) -> None:
    draw = random.Random(seed)
    model = dataclasses.replace(
        draw.choice([tasks.DENSE, tasks.EXPERTS]),
        num_layers=draw.choice([4, 6, 8]),
        hidden_size=256,
        vocab_size=draw.choice([1000, 32000]),
    )
    job = {"seq_length": draw.choice([128, 512]), "attention": draw.choice(["flash", "unfused"])}
    task = tasks.task(model, devices=draw.choice([4, 8]), global_batch_size=draw.choice([8, 16]), **job)
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    columns = space.columns()
    predictions = ENGINE.predict(task, columns, tasks.costs(task))
    memory, seconds = predictions.device_used_bytes, predictions.step_time_s
    compared = 0
    for row in draw.sample(range(len(space)), 60):
        one = space.candidate(row)
        above = ENGINE.needs_at_least(columns, one)
        assert np.all(memory[above] >= memory[row] * (1 - 1e-9)), contradiction(space, memory, above, row)
        longer = ENGINE.takes_at_least(columns, one)
        assert np.all(seconds[longer] >= seconds[row] * (1 - 1e-9)), contradiction(space, seconds, longer, row)
        compared += int(above.sum()) + int(longer.sum()) - 2
    assert compared > 100


def contradiction(space: object, figures: np.ndarray, rows: np.ndarray, row: int) -> str:
    lowest = int(np.flatnonzero(rows)[np.argmin(figures[rows])])
    return f"{space.candidate(lowest)}: {figures[lowest]} < {figures[row]}: {space.candidate(row)}"  # type: ignore[attr-defined]


LATENT = dataclasses.replace(
    tasks.EXPERTS, **tasks.LATENT, moe_first_dense_layers=1, moe_shared_expert_intermediate_size=64, mtp_num_layers=1
)
TIED = dataclasses.replace(tasks.DENSE, untie_embeddings_and_output_weights=False, qk_layernorm=True)


@pytest.mark.parametrize("model", [tasks.DENSE, tasks.EXPERTS, LATENT, TIED])
def test_parts_add_up_to_the_unsplit_model(model: Model) -> None:
    task = tasks.task(model, devices=1)
    held = ENGINE.plans.components(task, candidate_columns({}), np.zeros(1, dtype=np.int64), tasks.costs(task))
    parts = ENGINE.plans.model(task)
    assert sum(part.params * part.layers for part in parts) == sum(float(each["params"][0]) for each in held.values())


def test_parts_do_not_depend_on_settings_that_split() -> None:
    settings = {"expert_tensor_parallel_size": 2, "account_for_loss_in_pipeline_split": True}
    assert ENGINE.plans.model(tasks.task(LATENT, settings=settings)) == ENGINE.plans.model(tasks.task(LATENT))


def test_parts_are_named_as_papers_name_them() -> None:
    assert " ".join(part.name for part in ENGINE.plans.model(tasks.task(LATENT))) == "Embedding MLA MoE MLP MTP Output"
    found = {part.name: part.layers for part in ENGINE.plans.model(tasks.task())}
    assert found == {"Embedding": 1, "Attention": 4, "MLP": 4, "Output": 1}


def test_layers_that_attend_to_pieces_attend_to_all_tokens() -> None:
    """megatron-core 0.19 has no chunked attention."""
    pieces = Attention(num_heads=16, groups=8, head_dim=128, value_dim=128, window=1024, pieces=True)
    whole = dataclasses.replace(pieces, window=None, pieces=False)
    network = Dense(width=5632, gated=True)
    layers = [tuple(Layer(mixer=each, network=network) for each in (first, whole)) * 8 for first in (pieces, whole)]
    models = [dataclasses.replace(DENSE, layers=each) for each in layers]
    jobs = [tasks.task(each, seq_length=4096, implementation="transformer_engine") for each in models]
    assert training(jobs[0]).model == training(jobs[1]).model
    assert [any("pieces" in each for each in ENGINE.warnings(job)) for job in jobs] == [True, False]


@pytest.mark.parametrize(("architecture", "said"), [("sm_90", False), ("gfx950", False), ("", True)])
def test_layers_of_other_software_are_said_to_be_predicted_as_transformer_engines(
    architecture: str, said: bool
) -> None:
    job = tasks.task(implementation="transformer_engine", assumed={"overlap_grad_reduce": True})
    group = dataclasses.replace(
        job.cluster.groups[0], chip=dataclasses.replace(job.cluster.groups[0].chip, architecture=architecture)
    )
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, groups=(group,)))
    assert any("Transformer Engine" in line for line in ENGINE.warnings(job)) == said
