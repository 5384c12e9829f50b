"""Jobs whose samples have several lengths. The fields of layouts by which times of layers and of stages are computed
once. The clock of the micro-benchmark, in a separate process: torch stays out of this one."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import layers_of
from flagcore_training.layout import ArrayRecord, LayerLayout, Layout, Options, StageLayout, Training
from flagcore_training.lengths import attention_length, in_time, packs, slowest
from flagcore_training.time.layer import REORDER_LAUNCHES, layer_time
from flagcore_training.time.passes import Seconds
from flagcore_training.time.stage import Blocks, WorkTable
from flagcore_training.time.step import step_time
from flagcore_training.weights import model_flops

from engines.training.tests.simulation import DEEPSEEK_16B, layout, plain_costs, train
from engines.training.tests.simulation import train as train_of
from flagcore.contracts import Costs
from flagcore.domain.work import Lengths

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
        return layer_time(job, LayerLayout.of(job, two), plain_costs(), layers_of(job.model)[0]).forward

    fused, whole = forward(one_by_one=True), forward(rope_fusion=False)
    apart = forward(rope_fusion=False, one_by_one=True)
    count = np.mean([len(each) for each in packs(MIXED, SEQUENCE)])
    more = whole.launches - fused.launches
    assert apart.launches - fused.launches == pytest.approx(more * count)
    assert (fused.compute < whole.compute).all()
    assert forward(None, rope_fusion=False, one_by_one=True).launches == pytest.approx(whole.launches)
    reordered = forward(one_by_one=True, cp_comm="a2a").launches - fused.launches
    assert reordered == pytest.approx([0.0, 4.0 * count * REORDER_LAUNCHES[0]])


USUAL = {"tensor": 2.0, "sequence_parallel": 1.0, "context": 2.0, "data": 8.0, "expert": 4.0, "expert_tensor": 2.0}
USUAL |= {"pipeline": 2.0, "micro_batch": 2.0, "microbatches": 16.0, "selective": 1.0, "block": 2.0}
OTHER = {"tensor": 4.0, "sequence_parallel": 0.0, "context": 4.0, "data": 16.0, "expert": 8.0, "expert_tensor": 1.0}
OTHER |= {"pipeline": 3.0, "micro_batch": 4.0, "microbatches": 32.0, "selective": 0.0, "block": 4.0, "virtual": 2.0}
OTHER |= {"uniform": 1.0, "sharded_optimizer": 1.0, "expert_groups": 1.0, "first_layers": 4.0, "last_layers": 4.0}
JOB = train(
    replace(DEEPSEEK_16B, mtp_num_layers=1),
    transformer_engine=True,
    options=Options(overlap_expert_comm=True, dispatcher="alltoall", recompute_modules=frozenset({"layernorm"})),
)
GRAPHS = replace(JOB, options=replace(JOB.options, graphs=frozenset({"attn"})))


def numbers(record: Any) -> list[float]:
    """Return all numbers of a record and of the records in it."""
    if isinstance(record, tuple):
        return [number for each in record for number in numbers(each)]
    if isinstance(record, ArrayRecord):
        return [number for each in fields(record) for number in numbers(getattr(record, each.name))]
    return np.ravel(record).tolist() if isinstance(record, (np.ndarray, float)) else []


def of_layers(job: Training, found: Layout, costs: Costs) -> list[float]:
    return numbers(Blocks.from_layout(job, found, costs).on(0))


def of_stages(job: Training, found: Layout, costs: Costs) -> list[float]:
    table = WorkTable.from_blocks(job, StageLayout.of(job, found), costs, Blocks.from_layout(job, found, costs))
    return np.ravel(table.stage(1, first=True, mtp=True, last=True).seconds(np.full(1, 6.0))).tolist()


@pytest.mark.parametrize(("seconds", "keys"), [(of_layers, LayerLayout), (of_stages, StageLayout)])
def test_times_differ_by_the_fields_that_they_are_given_and_by_no_other(seconds: Any, keys: Any) -> None:
    bases, found, costs = (USUAL, {**USUAL, "selective": 0.0, "block": 0.0}), set(), plain_costs()
    for job, base in product((JOB, GRAPHS), bases):
        usual, one = seconds(job, layout(**base), costs), keys.of(job, layout(**base))
        for name, value in OTHER.items():
            other = layout(**{**base, name: value})
            if not np.allclose(usual, seconds(job, other, costs), rtol=1e-12, atol=0.0):
                two = keys.of(job, other)
                changed = {key for key in keys.__dataclass_fields__ if (getattr(one, key) != getattr(two, key)).any()}
                assert changed, name
                found |= changed
    assert found == {*keys.__dataclass_fields__}


ACCELERATOR = """
import json, time
from types import SimpleNamespace
import torch
from flagcore_training.microbench.kernels import Bench, MAX_QUEUED_CALLS

class Device:
    '''Stands for torch.cuda and its like: works off what was launched, in order, in its own time.'''
    def __init__(self):
        self.now, self.launched = 0.0, 0
    def run(self, seconds):
        self.now = max(self.now, time.perf_counter()) + seconds
        self.launched += 1
    def synchronize(self):
        time.sleep(max(0.0, self.now - time.perf_counter()))
    def Event(self, enable_timing):
        device = self
        class Event:
            def record(self):
                self.at = max(device.now, time.perf_counter())
            def elapsed_time(self, later):
                return (later.at - self.at) * 1e3
        return Event()

device = Device()
bench = Bench("cpu", 0, False)
bench.cpu, bench._module = False, device
bench._filler = SimpleNamespace(bitwise_not_=lambda: device.run(1e-4))

def kernel():
    time.sleep(2e-4)  # the host is slower than the device
    device.run(5e-5)

print(json.dumps(bench.time(kernel, 0.2).seconds))
"""

PLAN = """
import json
import torch
from importlib.util import find_spec
from pathlib import Path
from flagcore_training.microbench import kernels
from flagcore_training.microbench.kernels import Bench
from flagcore_training.microbench import BenchmarkJob
torch.set_num_threads(1)
bench = Bench("cpu", 0, False)
job = BenchmarkJob("cpu", "gloo", (), 1, True, 1, ("fp32",), 1 << 28, 1.0, Path("x"))
items = kernels.gemms(bench, job, "fp32")
rows = list(kernels.measured(bench, items, 2.0))
print(json.dumps({"planned": len(items), "rows": rows,
                  "unmultiplied": len(kernels.gemms(bench, job, "int3"))}))
"""


def run(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.costly
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_kernel_that_is_shorter_than_its_launch_is_timed_by_the_device() -> None:
    assert run(ACCELERATOR) == pytest.approx(5e-5, rel=0.3)


@pytest.mark.costly
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_with_too_little_time_small_and_large_kernels_are_measured_first() -> None:
    found = run(PLAN)
    work = [row["m"] * row["n"] * row["k"] for row in found["rows"]]
    assert 5 < len(work) < found["planned"]
    assert max(work) > 100 * min(work)
    assert found["unmultiplied"] == 0
    assert all(row["repeats"] >= 3 and row["us"] > 0 for row in found["rows"])
