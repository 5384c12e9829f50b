"""The vision tower in training: on the first stage, frozen or trained."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_training.layout import Layout, Tower, Training
from flagcore_training.memory import training as memory
from flagcore_training.stages import stage
from flagcore_training.time.pace import Pace
from flagcore_training.time.stage import Blocks
from flagcore_training.time.step import costs_in_run, passes, step_time
from flagcore_training.weights import model_flops, parts_of_model

from engines.training.tests.simulation import LLAMA, layout, plain_costs, rank_memory, state_bytes, train
from tests.tasks import VISION

PLAIN = replace(VISION, gated_linear_unit=False, full_layers=VISION.num_layers, window_size=0)
TOWER = Tower(vision=PLAIN, images=4.0, tokens=256)
TEXT = train(transformer_engine=True, fused_activation=True)
STAGED = {"pipeline": 4.0, "tensor": 2.0, "sharded_optimizer": 1.0}
FROZEN = {"frozen": True, "frozen_mergers": True}


def seeing(**values: Any) -> Training:
    return replace(TEXT, tower=replace(TOWER, **values))


def seconds(work: Training, split: Layout) -> float:
    return float(sum(each[0] for each in step_time(work, split, plain_costs()).values()))


def test_only_the_first_stage_has_the_tower() -> None:
    split = layout(**STAGED)
    for work in (seeing(), seeing(**FROZEN)):
        more = [
            rank_memory(work, split, rank).peak[0] - rank_memory(TEXT, split, rank).peak[0] for rank in (0, 2, 4, 6)
        ]
        assert more[0] > PLAIN.weights
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
    assert static["trained"] - static["text"] == pytest.approx(18 * PLAIN.weights / tensor, rel=1e-3)
    assert static["frozen"] - static["text"] == pytest.approx(2 * PLAIN.weights / tensor, rel=1e-3)
    assert static["layers"] - static["frozen"] == pytest.approx(16 * PLAIN.merger_weights / tensor, rel=1e-3)


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
    assert table["params"][0] == pytest.approx(PLAIN.weights)
    assert state_bytes(table)[0] == pytest.approx(18 * PLAIN.weights)
    tower, *others = parts_of_model(seeing())
    assert (tower.params, tower.layers) == (PLAIN.weights, 1)
    assert others == list(parts_of_model(TEXT))


@pytest.mark.parametrize("again", [{}, {"uniform": 1.0}, {"block": 4.0}, {"selective": 1.0}])
def test_the_search_for_splits_sees_the_tower(again: dict[str, float]) -> None:
    work, split, costs = seeing(), layout(**STAGED, **again), costs_in_run(plain_costs())
    first = stage(work.model, split, np.zeros(1), work.options)
    pace = Pace.from_blocks(work, split, costs, Blocks.from_layout(work, split, costs))
    found = passes(work, split, plain_costs())
    busy = found.forward_s[0] + found.backward_s[0]
    assert pace.seconds(first.layers, 0, first=True)[0] == pytest.approx(busy, rel=1e-6)
    assert LLAMA.num_layers == 4 * first.layers[0]
