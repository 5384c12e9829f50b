"""Stages of models with several kinds of layers, and with a vision tower: on the first stage, frozen or trained."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import layers_of
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_models.parts.tower import VisionTower
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import DEFAULTS, LayerLayout, Layout, Options, StageLayout, Tower, Training
from flagcore_training.memory import training as memory
from flagcore_training.memory.states import largest_matrix
from flagcore_training.splits import StageLayers
from flagcore_training.stages import layer_input_bytes, placed, stage, stages
from flagcore_training.time.layer import layer_time
from flagcore_training.time.stage import Blocks, WorkTable
from flagcore_training.time.step import costs_in_run, passes, step_time
from flagcore_training.weights import model_flops, parts_of_model, stage_parameters

from engines.models.tests.examples import layer_of
from engines.training.tests.simulation import LLAMA, layout, plain_costs, rank_memory, state_bytes, train
from flagcore.domain.model import Layer, Model
from tests.tasks import VISION

MAMBA = Mamba2(num_heads=128, head_dim=64, state_size=128)
FULL, WINDOW, STATE = (layer_of(LLAMA, each) for each in ({}, {"window": 128}, MAMBA))
EXPERTS = replace(LLAMA, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4096, vocab_size=1024)
MIXED = replace(LLAMA, num_layers=12, layers=(*(STATE,) * 6, *(FULL, STATE) * 3), vocab_size=1024)
SPARSE = replace(
    EXPERTS,
    num_layers=8,
    moe_first_dense_layers=1,
    layers=(FULL, *(layer_of(EXPERTS, MAMBA, "experts"), layer_of(EXPERTS, {}, "experts")) * 3, WINDOW),
)


LOOP = replace(MIXED, num_layers=24, layers=(*MIXED.layers, *(replace(each, repeats=True) for each in MIXED.layers)))


def numbers(model: Model, split: Layout, index: int, options: Options = DEFAULTS) -> list[float]:
    """Return the number of layers of each kind on a stage."""
    return [float(each[0]) for each in stage(model, split, np.array([float(index)]), options).numbers]


def work(model: Model, **values: Any) -> Training:
    return train(model, transformer_engine=True, **values)


def test_the_largest_matrix_may_be_that_of_a_mixer_with_states() -> None:
    found = largest_matrix(work(MIXED), layout(tensor=2), {"mixers": np.ones(1)}, experts=False)
    assert found == max(each.weights for each in MAMBA.products(LLAMA.hidden_size)) / 2


@pytest.mark.parametrize("layers", [(), (FULL,) * 32, (STATE,) * 32])
def test_layers_that_are_alike_are_of_one_kind(layers: tuple[Layer, ...]) -> None:
    model = replace(LLAMA, layers=layers)
    assert layer_kinds(model).are_plain
    assert numbers(model, layout(pipeline=4.0), 1) == [8]


@pytest.mark.parametrize(
    ("virtual", "index", "counts"),
    [
        (1.0, 0, [6, 0]),
        (1.0, 1, [3, 3]),
        (2.0, 0, [3 + 1, 2]),  # layers 0 to 2 and 6 to 8
        (2.0, 1, [3 + 2, 1]),
    ],
)
def test_a_stage_has_its_own_layers(virtual: float, index: int, counts: list[int]) -> None:
    assert numbers(MIXED, layout(pipeline=2.0, virtual=virtual), index) == counts


def test_the_leading_dense_layers_of_each_stage_are_counted_apart() -> None:
    assert [numbers(SPARSE, layout(pipeline=2.0), index) for index in (0, 1)] == [[1, 2, 1, 0], [0, 1, 2, 1]]
    assert [stage(SPARSE, layout(pipeline=2.0), np.full(1, index)).leading for index in (0.0, 1.0)] == [1, 0]


@pytest.mark.parametrize("model", [MIXED, SPARSE, LOOP])
@pytest.mark.parametrize("sizes", [{"pipeline": 4.0}, {"pipeline": 2.0, "virtual": 2.0}, {"pipeline": 3.0}])
def test_stages_have_the_weights_of_the_model(model: Model, sizes: dict[str, float]) -> None:
    whole = stage_parameters(work(model), layout(), stage(model, layout(), np.zeros(1)))
    split = layout(**sizes)
    each = [
        stage_parameters(work(model), split, stage(model, split, np.array([float(number)])))
        for number in range(int(sizes["pipeline"]))
    ]
    for name in whole.keys() - {"embedding", "output_head"}:
        assert sum(float(np.ravel(part.get(name, 0.0))[0]) for part in each) == pytest.approx(float(whole[name][0]))


def test_layers_that_run_twice_have_the_weights_of_one_run_and_twice_its_time_and_activations() -> None:
    once, twice = (rank_memory(work(model), layout(), 0) for model in (MIXED, LOOP))
    assert twice.static[0] == pytest.approx(once.static[0])
    assert 1.5 * once.activation[0] < twice.activation[0] < 2.0 * once.activation[0]
    assert parts_of_model(work(LOOP)) == parts_of_model(work(MIXED))
    times = [passes(work(model), layout(), plain_costs()).backward_s[0] for model in (MIXED, LOOP)]
    assert 1.5 * times[0] < times[1] < 2.0 * times[0]


def test_residual_streams_are_stored_before_each_block_and_sent_between_stages() -> None:
    wide, split = replace(LLAMA, residual_streams=4, residual_weights=1000), layout(pipeline=2.0)
    memory, more = (rank_memory(work(model), split, 1).activation[0] for model in (LLAMA, wide))
    assert more - memory == pytest.approx((2 * 16 + 1) * 4 * layer_input_bytes(work(LLAMA), split)[0], rel=0.1)
    assert layer_input_bytes(work(wide), split) == 4 * layer_input_bytes(work(LLAMA), split)
    assert sum(part.params * part.layers for part in parts_of_model(work(wide))) == 6_738_415_616 + 64_000


@pytest.mark.parametrize(("graphs", "parts"), [((), 2), (("attn",), 1), (("attn", "mlp"), 0)])
def test_residual_streams_launch_kernels_outside_graphs_and_few_if_they_are_fused(
    graphs: tuple[str, ...], parts: int
) -> None:
    def launches(streams: int, *, fused: bool) -> list[float]:
        options = replace(DEFAULTS, graphs=frozenset(graphs), fused_streams=fused)
        job = work(replace(LLAMA, residual_streams=streams), options=options)
        found = layer_time(job, LayerLayout.of(job, layout()), plain_costs(), layers_of(job.model)[0])
        return [float(each.launches[0]) for each in (found.forward, found.backward)]

    plain, few, many = launches(1, fused=False), launches(4, fused=True), launches(4, fused=False)
    assert [each - base for each, base in zip(few, plain, strict=True)] == [6 * parts, 9 * parts]
    assert [each - base for each, base in zip(many, plain, strict=True)] == [131 * parts, 535 * parts]


def test_the_time_and_memory_of_a_stage_are_those_of_its_layers() -> None:
    split, (early, late) = (
        layout(pipeline=2.0),
        (replace(MIXED, layers=(*layers, *layers)) for layers in (MIXED.layers[:6], MIXED.layers[6:])),
    )
    mixed, first, last = (passes(work(each), split, plain_costs()) for each in (MIXED, early, late))
    assert mixed.forward_s[0] == pytest.approx(first.forward_s[0], rel=1e-9)
    assert mixed.forward_s[1] == pytest.approx(last.forward_s[1], rel=1e-9)
    peaks = [[rank_memory(work(each), split, rank).peak[0] for rank in (0, 1)] for each in (MIXED, early, late)]
    assert peaks[0] == pytest.approx([peaks[1][0], peaks[2][1]])


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [("zb-v", [[3 + 2, 1], [3 + 1, 2]]), ("dualpipe", [[4.5, 1.5], [4.5, 1.5]])],
    ids=["layers 0 to 2 and 9 to 11", "a copy of both stages"],
)
def test_a_schedule_that_folds_the_pipeline_has_layers_of_both_ends(schedule: str, counts: list[list[float]]) -> None:
    options, split = Options(schedule=schedule), layout(pipeline=2.0)
    assert [numbers(MIXED, split, index, options) for index in (0, 1)] == counts


def test_virtual_stages_of_an_explicit_split_have_their_own_layers() -> None:
    chunks = [StageLayers(layers=count) for count in (7, 1, 2, 2)]
    split, options = placed(MIXED, layout(pipeline=2.0, virtual=2.0), Options(), chunks)
    assert [numbers(MIXED, split, index, options) for index in (0, 1)] == [[6 + 1, 1 + 1], [1 + 1, 1]]


def test_an_explicit_split_and_the_stages_that_stand_for_others() -> None:
    chunks = [StageLayers(embedding=1, layers=8), StageLayers(layers=2), StageLayers(layers=2, loss=1)]
    split, options = placed(MIXED, layout(pipeline=3.0), Options(), chunks)
    assert [numbers(MIXED, split, index, options) for index in (0, 1, 2)] == [[7, 1], [1, 1], [1, 1]]
    long = layout(pipeline=np.array([12.0, 4.0]))
    indices = [each.index.tolist() for each in stages(MIXED, long)]
    assert [6.0, 2.0] in indices  # the first with attention
    assert len(indices) < 12


def test_candidates_without_a_split_may_have_longer_pipelines_than_those_with_one() -> None:
    four, stages_of_two = (
        layout(pipeline=[4.0, 2.0]),
        (StageLayers(embedding=1, layers=6), StageLayers(layers=6, loss=1)),
    )
    job, options = placed(MIXED, four, Options(), stages_of_two)
    assert job.split.tolist() == [0.0, 1.0]
    found = stages(MIXED, job, options)
    assert sum(each.layers[0] for each in found) == 12.0
    assert found[-1].layers[1] == 6.0


PLAIN = replace(VISION, gated_linear_unit=False, full_layers=VISION.num_layers, window_size=0)
WHOLE = VisionTower(vision=PLAIN)
TOWER = Tower(vision=PLAIN, images=4.0, tokens=256)
TEXT = train(transformer_engine=True, fused_activation=True)
STAGED = {"pipeline": 4.0, "tensor": 2.0, "sharded_optimizer": 1.0}
FROZEN = {"frozen": True, "frozen_mergers": True}


def seeing(**values: Any) -> Training:
    return replace(TEXT, tower=TOWER._replace(**values))


def seconds(work: Training, split: Layout) -> float:
    return float(sum(each[0] for each in step_time(work, split, plain_costs()).values()))


def test_only_the_first_stage_has_the_tower() -> None:
    split = layout(**STAGED)
    for work in (seeing(), seeing(**FROZEN)):
        more = [
            rank_memory(work, split, rank).peak[0] - rank_memory(TEXT, split, rank).peak[0] for rank in (0, 2, 4, 6)
        ]
        assert more[0] > WHOLE.weights
        assert more[1:] == [0.0, 0.0, 0.0]
        found, text = (passes(each, split, plain_costs()) for each in (work, TEXT))
        assert found.forward_s[0] > text.forward_s[0]
        assert found.forward_s[1:] == text.forward_s[1:]


@pytest.mark.parametrize("tensor", [1.0, 2.0])
def test_frozen_weights_have_no_gradients_and_no_states(tensor: float) -> None:
    split = layout(tensor=tensor)
    static = {
        name: rank_memory(work, split, 0).static[0]
        for name, work in (
            ("text", TEXT),
            ("trained", seeing()),
            ("frozen", seeing(**FROZEN)),
            ("layers", seeing(frozen=True)),
        )
    }
    assert static["trained"] - static["text"] == pytest.approx(18 * WHOLE.weights / tensor, rel=1e-3)
    assert static["frozen"] - static["text"] == pytest.approx(2 * WHOLE.weights / tensor, rel=1e-3)
    assert static["layers"] - static["frozen"] == pytest.approx(16 * WHOLE.merger_weights / tensor, rel=1e-3)


def test_a_tower_of_transformers_is_whole_on_each_rank_and_has_windows() -> None:
    one, two = (
        rank_memory(seeing(vision=VISION), layout(tensor=n), 0).static[0]
        - rank_memory(TEXT, layout(tensor=n), 0).static[0]
        for n in (1.0, 2.0)
    )
    assert one == pytest.approx(two)
    large = {"images": 1.0, "tokens": 1024}
    windowed, full = (
        seconds(seeing(vision=each, **large), layout())
        for each in (VISION, replace(VISION, full_layers=VISION.num_layers))
    )
    assert windowed < full


def test_images_take_time_and_memory_that_freezing_saves() -> None:
    split = layout(microbatches=1.0)
    works = [TEXT, seeing(**FROZEN), seeing(frozen=True), seeing(), seeing(images=8.0)]
    for figures in (
        [seconds(each, split) for each in works],
        [rank_memory(each, split, 0).activation[0] for each in works],
        [model_flops(each) for each in works],
    ):
        assert figures == sorted(figures)
    assert seconds(works[-1], split) - seconds(TEXT, split) > 1.5 * (seconds(works[3], split) - seconds(TEXT, split))


@pytest.mark.parametrize("again", [{"uniform": 1.0}, {"block": 8.0}])
def test_the_tower_is_recomputed_as_the_language_model_is(again: dict[str, float]) -> None:
    plain, split = layout(microbatches=8.0, pipeline=4.0), layout(microbatches=8.0, pipeline=4.0, **again)

    def of_tower(split: Layout, **values: Any) -> tuple[float, float]:
        works = seeing(**values), TEXT
        parts = [memory.component_table(each, split, np.zeros(1)) for each in works]
        busy = [passes(each, split, plain_costs()).backward_s[0] for each in works]
        return parts[0]["vision"]["activation_bytes"][0], busy[0] - busy[1]

    (stored, time), (less, longer) = of_tower(plain), of_tower(split)
    assert less < stored
    assert longer > 1.05 * time
    assert of_tower(split, frozen=True)[1] == pytest.approx(of_tower(plain, frozen=True)[1], rel=1e-3)


def test_the_component_is_in_the_table_with_its_states() -> None:
    table = memory.component_table(seeing(), layout(), np.zeros(1))["vision"]
    assert table["params"][0] == pytest.approx(WHOLE.weights)
    assert state_bytes(table)[0] == pytest.approx(18 * WHOLE.weights)
    tower, *others = parts_of_model(seeing())
    assert (tower.params, tower.layers) == (WHOLE.weights, 1)
    assert others == list(parts_of_model(TEXT))


@pytest.mark.parametrize("again", [{}, {"uniform": 1.0}, {"block": 4.0}, {"selective": 1.0}])
def test_the_search_for_splits_sees_the_tower(again: dict[str, float]) -> None:
    work, split, costs = seeing(), layout(**STAGED, **again), costs_in_run(plain_costs())
    first = stage(work.model, split, np.zeros(1), work.options)
    blocks = Blocks.from_layout(work, split, costs)
    table = WorkTable.from_blocks(work, StageLayout.of(work, split), costs, blocks)
    found = passes(work, split, plain_costs())
    busy = found.forward_s[0] + found.backward_s[0]
    assert table.stage(first=True).seconds(first.layers)[0] == pytest.approx(busy, rel=1e-6)
    assert LLAMA.num_layers == 4 * first.layers[0]
