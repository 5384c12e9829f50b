"""Jobs whose samples have several lengths."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import layers_of
from flagcore_training.lengths import attention_length, in_time, packs, slowest
from flagcore_training.time.layer import REORDER_LAUNCHES, layer_time
from flagcore_training.time.passes import Seconds
from flagcore_training.time.step import step_time
from flagcore_training.weights import model_flops

from engines.training.tests.candidates import layout, plain_costs
from engines.training.tests.candidates import train as train_of
from flagcore.domain.lengths import Lengths

SEQUENCE = 4096
MIXED = Lengths(values=(100, 200, 300, 400, 800, 2000))
EQUAL = Lengths(values=(SEQUENCE,))
CANDIDATES = layout(data=[1, 8, 8], micro_batch=[1, 1, 4])


def seconds(lengths: Lengths | None) -> np.ndarray:
    train = replace(train_of(), lengths=lengths)
    return np.sum(list(step_time(train, CANDIDATES, plain_costs()).values()), axis=0)


@pytest.mark.parametrize("batching", ["packed", "longest", "seq_length"])
def test_samples_of_the_whole_sequence_are_predicted_as_without_lengths(batching: str) -> None:
    lengths = replace(EQUAL, batching=batching)
    assert seconds(lengths) == pytest.approx(seconds(None))
    train = train_of()
    assert model_flops(replace(train, lengths=lengths)) == pytest.approx(model_flops(train))


def test_packed_samples_keep_tokens_and_pairs() -> None:
    train = replace(train_of(), lengths=MIXED)
    found = packs(MIXED, SEQUENCE)
    samples = np.array([length for each in found for length in each], dtype=float)
    assert max(map(sum, found)) <= SEQUENCE
    assert samples.sum() > 0.95 * SEQUENCE * len(found)
    assert attention_length(train, np.ones(1)) == pytest.approx((samples**2).sum() / samples.sum())
    assert (seconds(MIXED) < seconds(None)).all()


def test_padded_micro_batches_of_each_size_have_their_own_time() -> None:
    train = replace(train_of(), lengths=replace(MIXED, batching="longest"))
    both = layout(micro_batch=[1, 2])
    together, second = (step_time(train, each, plain_costs())["compute_s"] for each in (both, both[1:]))
    assert together[1] == pytest.approx(second[0])


def test_sequences_of_countless_samples_are_packed_in_a_moment() -> None:
    found = packs(Lengths(values=(1,) * 256), 1 << 30)
    assert {length for each in found for length in each} == {1}
    assert sum(map(len, found)) < 1e6


def test_padded_micro_batches_are_as_long_as_their_longest_sample() -> None:
    train = replace(train_of(), lengths=replace(MIXED, batching="longest"))
    draws = np.random.default_rng(0).choice(MIXED.values, size=(20_000, 4)).max(axis=1).astype(float)
    four = layout(micro_batch=4)
    assert in_time(train, four).micro_batch * SEQUENCE == pytest.approx(4 * draws.mean(), rel=0.02)
    length = attention_length(train, in_time(train, four).micro_batch)
    assert length == pytest.approx((draws**2).mean() / draws.mean(), rel=0.02)


def test_replicas_wait_for_the_longest_samples_unless_samples_are_balanced() -> None:
    lengths = replace(MIXED, batching="longest")
    train = replace(train_of(), lengths=lengths)
    many = layout(data=[1, 2, 16, 16], microbatches=[8, 8, 8, 64])
    once = slowest(train, many, 1e-4, each_micro_batch=False)
    assert once[0] == 1.0 < once[1] < once[2]
    assert once[3] < once[2]
    assert (slowest(train, many, 1e-4, each_micro_batch=True)[1:] > once[1:]).all()
    balanced = replace(train, lengths=replace(lengths, balanced=True))
    assert (slowest(balanced, many, 1e-4, each_micro_batch=True) == 1.0).all()
    assert (seconds(lengths) >= seconds(replace(lengths, balanced=True))).all()


def test_sequences_of_a_pack_that_are_taken_one_by_one_keep_the_host_busy() -> None:
    train, two = replace(train_of(), transformer_engine=True), layout(context=[1, 2])

    def forward(lengths: Lengths | None = MIXED, **options: Any) -> Seconds:
        job = replace(train, lengths=lengths, options=replace(train.options, **options))
        return layer_time(job, two, plain_costs(), layers_of(job.model)[0]).forward

    fused, whole = forward(one_by_one=True), forward(rope_fusion=False)
    apart = forward(rope_fusion=False, one_by_one=True)
    count = np.mean([len(each) for each in packs(MIXED, SEQUENCE)])
    more = whole.launches - fused.launches
    assert apart.launches - fused.launches == pytest.approx(more * count)
    assert (fused.compute < whole.compute).all()
    assert forward(None, rope_fusion=False, one_by_one=True).launches == pytest.approx(whole.launches)
    reordered = forward(one_by_one=True, cp_comm="a2a").launches - fused.launches
    assert reordered == pytest.approx([0.0, 4.0 * count * REORDER_LAUNCHES[0]])
