"""The parts of a step: what hides behind what, who waits for whom, and what grows with what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcore.contracts import Costs
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.cluster import Level, Topology
from flagcore.domain.model import Model
from flagcore.engines.training.layout import Layout, Options, Training
from flagcore.engines.training.parameters import model_flops
from flagcore.engines.training.time.step import rank_time, step_time
from flagcore.physics.collectives.costs import Collectives
from flagcore.physics.device_memory import PlainMemory
from flagcore.physics.kernels.roofline import Curve, Roofline
from tests.engines.training.candidates import training_memory

ASSUMED = Source(kind="estimated", detail="round figures")
CHIP = Chip(
    name="test-chip",
    vendor="test",
    memory_bandwidth_bytes_per_second=Fact(value=3e12, source=ASSUMED),
    dense_flops_per_second={
        "bf16": Fact(value=900e12, source=ASSUMED),
        "fp8": Fact(value=1800e12, source=ASSUMED),
    },
)
TOPOLOGY = Topology(
    levels=(
        Level(name="node", devices=8, bytes_per_second=400e9, latency_seconds=5e-6),
        Level(name="network", devices=1024, bytes_per_second=50e9, latency_seconds=20e-6),
    )
)
DENSE = Model(
    name="dense",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=128256,
)
SPARSE = replace(
    DENSE, name="sparse", num_moe_experts=64, moe_router_topk=8, moe_ffn_hidden_size=1408, moe_first_dense_layers=1
)
TRAIN = Training(
    model=DENSE, sequence=4096, global_batch=512, precision="bf16", fused_activation=True, transformer_engine=True
)
ONE = {
    "data": 8.0,
    "tensor": 1.0,
    "pipeline": 1.0,
    "virtual": 1.0,
    "context": 1.0,
    "expert": 1.0,
    "expert_tensor": 1.0,
    "micro_batch": 1.0,
    "microbatches": 32.0,
    "sharded_optimizer": 1.0,
    "sequence_parallel": 0.0,
    "selective": 0.0,
    "uniform": 0.0,
    "block": 0.0,
    "first_layers": 0.0,
    "last_layers": 0.0,
    "split": 0.0,
}


def layout(**counts: float) -> Layout:
    return Layout(**{name: np.array([value]) for name, value in {**ONE, **counts}.items()})


def costs(curve: Curve | None = None) -> Costs:
    return Costs(
        memory=PlainMemory(capacity=80e9),
        kernels=Roofline(chip=CHIP, curve=curve or Curve()),
        collectives=Collectives(topology=TOPOLOGY),
    )


def parts(train: Training = TRAIN, made: Costs | None = None, **counts: float) -> dict[str, float]:
    return {name: float(value[0]) for name, value in step_time(train, layout(**counts), made or costs()).items()}


def total(train: Training = TRAIN, made: Costs | None = None, **counts: float) -> float:
    return sum(parts(train, made, **counts).values())


def with_options(train: Training = TRAIN, **options: object) -> Training:
    return replace(train, options=Options(**options))  # type: ignore[arg-type]


def test_compute_stays_above_the_peak_rate_and_near_it() -> None:
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    flops = 6.0 * weights * 4096 * 32
    assert 1.1 < parts()["compute_s"] / (flops / 900e12) < 1.8


def test_predictions_do_not_depend_on_other_candidates() -> None:
    rng = np.random.default_rng(0)
    rows = 500
    values = {name: np.full(rows, value) for name, value in ONE.items()}
    values |= {name: 2.0 ** rng.integers(0, 4, rows) for name in ("tensor", "pipeline", "context", "micro_batch")}
    values |= {"sequence_parallel": (values["tensor"] > 1).astype(float), "uniform": rng.integers(0, 2, rows) * 1.0}
    many = Layout(**values)
    all_seconds = step_time(TRAIN, many, costs())
    for row in rng.integers(0, rows, 20):
        one_seconds = step_time(TRAIN, many[np.array([row])], costs())
        for name, seconds in one_seconds.items():
            assert all_seconds[name][row] == pytest.approx(seconds[0], rel=1e-12), name


def test_full_recompute_costs_about_a_third_more_compute() -> None:
    ratio = parts(uniform=1.0)["compute_s"] / parts()["compute_s"]
    assert 1.25 < ratio < 1.36


@pytest.mark.parametrize("module", ["core_attn", "layernorm", "mlp"])
def test_selective_recompute_costs_something_and_less_than_full(module: str) -> None:
    chosen = with_options(recompute_modules=frozenset({module}))
    assert total() < total(chosen, selective=1.0) < total(uniform=1.0)


def test_tensor_parallelism_waits_longer_without_overlap_and_across_nodes() -> None:
    inside = parts(tensor=8.0, sequence_parallel=1.0, data=1.0)["tp_comm_s"]
    assert inside > 0
    overlapped = parts(with_options(tp_comm_overlap=True), tensor=8.0, sequence_parallel=1.0, data=1.0)["tp_comm_s"]
    assert overlapped < inside
    assert parts(tensor=16.0, sequence_parallel=1.0, data=1.0)["tp_comm_s"] > 1.5 * inside


def test_gradient_reduction_overlaps_backward_and_slows_it_slightly() -> None:
    plain = parts(microbatches=4.0)["dp_comm_exposed_s"]
    hidden = parts(with_options(overlap_grad_reduce=True, overlap_param_gather=True), microbatches=4.0)
    assert 0 < hidden["dp_comm_exposed_s"] < 0.5 * plain


def test_fewer_bytes_a_gradient_take_less_time() -> None:
    assert parts(with_options(grad_bytes=2))["dp_comm_exposed_s"] < parts()["dp_comm_exposed_s"]


def test_a_bubble_shrinks_with_micro_batches_virtual_stages_and_zero_bubble_schedules() -> None:
    def share(train: Training = TRAIN, **counts: float) -> float:
        found = parts(train, pipeline=8.0, data=1.0, **counts)
        return found["pp_bubble_s"] / sum(found.values())

    few = share(microbatches=16.0)
    assert share(microbatches=64.0) < 0.4 * few
    assert share(microbatches=16.0, virtual=4.0) < 0.5 * few
    assert share(with_options(schedule="zb-h1"), microbatches=16.0) < 0.6 * few
    assert share(with_options(schedule="zb-2p"), microbatches=16.0) < 0.3 * few


def test_the_slowest_stage_sets_the_pace() -> None:
    even = total(pipeline=4.0, microbatches=64.0)
    uneven = total(pipeline=4.0, microbatches=64.0, first_layers=14.0, last_layers=6.0)
    assert uneven > 1.2 * even


def test_stages_wait_for_messages_unless_virtual_stages_hide_them() -> None:
    shown = parts(with_options(overlap_p2p_comm=False), pipeline=4.0, virtual=4.0)
    hidden = parts(pipeline=4.0, virtual=4.0)
    assert shown["pp_comm_s"] > 10 * hidden["pp_comm_s"]


def test_small_layers_wait_for_the_host_and_graphs_do_not() -> None:
    small = replace(
        TRAIN, model=replace(DENSE, hidden_size=512, ffn_hidden_size=1024, num_attention_heads=4), sequence=256
    )
    slow, quick = costs(Curve(launch_seconds=50e-6)), costs(Curve(launch_seconds=1e-7))
    assert total(small, slow) > 3 * total(small, quick)
    graphed = replace(small, options=Options(cuda_graph="iteration"))
    assert total(graphed, slow) == pytest.approx(total(graphed, quick), rel=0.05)


def test_narrow_formats_speed_up_products_and_not_attention() -> None:
    ratio = parts(replace(TRAIN, precision="fp8"))["compute_s"] / parts()["compute_s"]
    assert 0.5 < ratio < 0.9


def test_experts_exchange_tokens_unless_local_or_overlapped() -> None:
    train = replace(TRAIN, model=SPARSE)
    exposed = parts(train, expert=8.0)["ep_comm_s"]
    assert exposed > 0
    assert parts(train)["ep_comm_s"] == 0
    hidden = replace(train, options=Options(overlap_expert_comm=True))
    assert parts(hidden, expert=8.0)["ep_comm_s"] < 0.5 * exposed
    flex = replace(train, options=Options(dispatcher="flex"))
    assert parts(flex, expert=8.0)["ep_comm_s"] < exposed


def test_the_busiest_expert_determines_the_time() -> None:
    train = replace(TRAIN, model=SPARSE)
    assert total(replace(train, options=Options(expert_imbalance=1.5)), expert=8.0) > 1.1 * total(train, expert=8.0)


def test_experts_one_by_one_launch_more_kernels_than_grouped_ones() -> None:
    train = replace(TRAIN, model=SPARSE)
    ungrouped = replace(train, options=Options(grouped_gemm=False))
    assert total(ungrouped) > total(train)


def test_adapters_have_neither_weight_gradients_nor_their_exchange() -> None:
    found = parts(with_options(adapters=True))
    assert found["dp_comm_exposed_s"] == 0
    assert found["compute_s"] < 0.75 * parts()["compute_s"]


def test_adapters_freeze_the_base_weights() -> None:
    static = [training_memory(train, layout()).static[0] for train in (with_options(adapters=True), TRAIN)]
    assert static[0] < 0.4 * static[1]


def test_the_optimizer_is_faster_if_more_ranks_share_its_state() -> None:
    shared = parts(data=64.0)["optimizer_s"]
    assert shared < parts(data=8.0)["optimizer_s"] < parts(sharded_optimizer=0.0)["optimizer_s"]


def test_a_single_rank_has_no_wait_time() -> None:
    counts = {"tensor": 4.0, "sequence_parallel": 1.0, "pipeline": 4.0, "data": 2.0}
    compute, optimizer = rank_time(TRAIN, layout(**counts), costs(), np.array([1.0]))
    step = parts(**counts)
    assert compute[0] <= step["compute_s"] * 1.001
    assert optimizer[0] <= step["optimizer_s"]
    last, _ = rank_time(TRAIN, layout(**counts), costs(), np.array([3.0]))
    assert last[0] > compute[0]


def test_an_unknown_rate_gives_no_time() -> None:
    bare = replace(costs(), kernels=Roofline(chip=Chip(name="bare", vendor="test")))
    assert np.isnan(total(made=bare))


def test_offloaded_activations_cost_nothing_behind_kernels_and_a_lot_over_a_slow_link() -> None:
    away = with_options(offload_modules=frozenset({"core_attn", "attn_proj"}))
    quick, slow = costs(Curve(host_bytes_per_second=500e9)), costs(Curve(host_bytes_per_second=1e9))
    assert total(away, quick) == pytest.approx(total(TRAIN, quick))
    assert total(away, slow) > 1.5 * total(TRAIN, slow)


def test_an_optimizer_on_the_host_is_slower() -> None:
    assert parts(with_options(optimizer_offload_fraction=1.0))["optimizer_s"] > 2 * parts()["optimizer_s"]


def test_a_stage_that_recomputes_more_layers_than_the_others_sets_the_pace() -> None:
    one = with_options(recompute_stage_layers=(8, 0, 0, 0))
    assert total(pipeline=4.0) < total(one, pipeline=4.0) < total(uniform=1.0, pipeline=4.0)


def test_fully_sharded_weights_are_gathered_for_each_micro_batch() -> None:
    sharded = with_options(fsdp=True)
    few, many = (parts(sharded, data=64.0, microbatches=count)["dp_comm_exposed_s"] for count in (4.0, 16.0))
    assert many == pytest.approx(4 * few)


def test_combinations_are_distinguished_regardless_of_their_size() -> None:
    large = {"tensor": [1.0, 4096.0, 4096.0], "context": [2.0**20, 2.0**20, 2.0**19], "micro_batch": [2.0**22] * 3}
    values = {name: np.full(3, value) for name, value in ONE.items()} | {
        name: np.array(value) for name, value in large.items()
    }
    first, which = Layout(**values).distinct(("tensor", "context", "micro_batch"))
    assert len(first) == 3
    assert len(set(which.tolist())) == 3


def test_a_pipeline_of_a_hundred_stages_with_one_layer_each_is_reported() -> None:
    deep = replace(TRAIN, model=replace(DENSE, num_layers=128), options=Options(schedule="zb-h1"))
    assert np.isfinite(total(deep, pipeline=128.0, microbatches=256.0))


def test_stages_without_layers_have_their_time() -> None:
    few = replace(TRAIN, model=replace(DENSE, num_layers=2))
    assert np.isfinite(total(few, pipeline=4.0, microbatches=8.0))


def test_groups_without_a_topology_do_not_slow_compute() -> None:
    bare = replace(costs(), collectives=Collectives(topology=Topology(levels=())))
    overlapping = with_options(overlap_grad_reduce=True)
    assert np.isnan(total(overlapping, bare))
    assert np.isfinite(total(overlapping, bare, data=1.0))


def test_model_flops_of_weights_that_adapters_leave_alone_need_no_gradients_of_weights() -> None:
    """6 flops a weight and token, 4 without its gradient; causal attention's scores take as many as ever."""
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    every = model_flops(TRAIN)
    with_adapters = model_flops(with_options(adapters=True))
    assert every - with_adapters == pytest.approx(2.0 * weights * TRAIN.sequence * TRAIN.global_batch)
    assert with_adapters == pytest.approx(
        TRAIN.sequence * TRAIN.global_batch * (4.0 * weights + 6.0 * 32 * 4096 * TRAIN.sequence)
    )


def test_a_slow_network_delays_stages_that_share_a_node() -> None:
    def step(rate: float) -> float:
        network = replace(TOPOLOGY.levels[1], bytes_per_second=rate)
        slow = Collectives(topology=Topology(levels=(TOPOLOGY.levels[0], network)))
        return total(made=replace(costs(), collectives=slow), data=4.0, pipeline=16.0)

    assert step(1e6) > 10 * step(50e9)


def test_a_ring_of_context_ranks_costs_more_than_the_same_tokens_on_one() -> None:
    one = parts(data=8.0)["compute_s"]
    eight = parts(data=1.0, context=8.0, micro_batch=8.0)["compute_s"]
    assert one < eight < 1.2 * one


def test_isolated_kernel_times_are_scaled_in_a_step_but_not_in_a_rank() -> None:
    isolated = replace(costs(), run_slowdown=1.25)
    assert parts(made=isolated)["compute_s"] == pytest.approx(1.25 * parts()["compute_s"], rel=0.02)
    first, second = (rank_time(TRAIN, layout(), result, np.zeros(1)) for result in (costs(), isolated))
    assert [part.tolist() for part in first] == [part.tolist() for part in second]
