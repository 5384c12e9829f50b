"""Times of images: the front end, the vision tower, and its ranks."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore.engines.serving.load.images import Image
from flagcore.engines.serving.model.disaggregated import Disaggregated, Prefill
from flagcore.engines.serving.model.simulation import Price, Simulation
from flagcore.engines.serving.model.vision import EncoderCosts, ImageWork, encoder_costs, image_work
from flagcore.engines.serving.model.work import PIXEL, Serving
from tests.engines.serving.model.test_simulation import LANE, OVER
from tests.served import DENSE, costs, settings, times
from tests.small import VISION

WORK = [ImageWork(patches=100.0, pairs=1e4, images=1, pixels=1_000_000)] * 2
ENCODE_S = 0.5
PRICE = Price(times(), 0, LANE, OVER, lambda images: [ENCODE_S] * len(images))


def test_an_image_waits_for_the_front_end_and_the_tower() -> None:
    lengths, arrivals = [(512, 3), (512, 3)], [0.0, 10.0]
    text, seen = (Simulation(PRICE, lengths, arrivals, 1, images=images).run() for images in ((), WORK))
    added = [after.first - before.first for before, after in zip(text.requests, seen.requests, strict=True)]
    assert added == pytest.approx([ENCODE_S + 1e6 * PIXEL] * 2)


def test_images_are_decoded_one_after_the_other() -> None:
    lengths = [(512, 3)] * 2
    free = Price(times(), 0, LANE, OVER, lambda images: [0.0] * len(images))
    text, seen = (Simulation(free, lengths, [0.0, 0.0], 2, images=images).run() for images in ((), WORK))
    assert seen.requests[1].first == pytest.approx(text.requests[1].first + 2e6 * PIXEL, rel=0.1)


def test_the_instance_that_prefills_has_the_tower() -> None:
    decode = Price(times(), 0, LANE, OVER, lambda images: [9.0] * len(images))
    prefill = Prefill(price=PRICE, per_decode=1.0, transfer=0.0)
    text, seen = (Disaggregated(decode, prefill, [(512, 3)], [0.0], 1, images).run() for images in ((), WORK[:1]))
    assert seen.requests[0].first - text.requests[0].first == pytest.approx(ENCODE_S + 1e6 * PIXEL)


def test_ranks_with_whole_towers_divide_the_images_of_a_request() -> None:
    encoder = EncoderCosts(*(np.array([each]) for each in (1e-3, 1e-6, 0.05, 4.0)))
    several = [ImageWork(400.0, 4e4, count, 0) for count in (1, 2, 8, 0)]
    assert encoder.seconds(0, several) == pytest.approx([0.44, 0.22, 0.11, 0.0])
    assert encoder.seconds(0, [ImageWork(4.0, 1.0, 1, 0)]) == [0.05]


def test_patches_attend_to_windows_in_most_layers() -> None:
    (work, none) = image_work([(Image(1280, 720), Image(56, 56)), ()], VISION)
    assert work.patches == 4 * 1196 + 16
    assert work.pairs == 4 * (4784**2 + 16**2) + 28 * (4784 * 64 + 16 * 16)
    assert (work.images, work.pixels) == (2, 1280 * 720 + 56 * 56)
    assert none == (0.0, 0.0, 0, 0)


def test_products_of_a_tower_are_those_of_its_weights() -> None:
    serving = Serving(model=replace(DENSE, vision=VISION), precision="bf16", overheads=OVER)
    found, whole = (
        encoder_costs(VISION, serving, settings(tensor=[1, 4], **shares), costs())
        for shares in ({}, {"tower_shares": 1.0})
    )
    peak = costs().kernels.gemm_seconds(*(np.array([4096.0]) for _ in range(3)), "bf16")[0] / (2 * 4096.0**3)
    least = 2 * (VISION.layer_weights + VISION.merger_weights / VISION.merge_size**2) * peak
    assert least < found.patch[0] < 3 * least
    assert found.patch[0] / 4 < found.patch[1] < found.patch[0]
    assert found.ranks.tolist() == [1.0, 1.0]
    assert whole.ranks.tolist() == [1.0, 4.0]
