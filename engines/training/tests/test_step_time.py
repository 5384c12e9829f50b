"""The parts of a step: what hides behind what, who waits for whom, and what grows with what."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import layers_of
from flagcore_models.mixers.attention import Indexer
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_training.layout import WHOLE_STEP, LayerLayout, Layout, Options, Training, distinct
from flagcore_training.time.layer import layer_time
from flagcore_training.time.step import costs_in_run, rank_time, step_time
from flagcore_training.weights import model_flops

from engines.models.tests.examples import COMPRESSED, mixed
from engines.training.tests.simulation import LLAMA, TOPOLOGY, plain_costs
from engines.training.tests.simulation import layout as layout_of
from engines.training.tests.simulation import train as train_of
from flagcore.contracts import Costs
from flagcore.domain.cluster import Topology
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter
from flagcore.physics.collective_costs import Collectives
from flagcore.physics.roofline import Curve, PlainMemory, Roofline
from tests.product import tasks

CHIP = tasks.chip(bf16=9e14, fp8=1.8e15)
DENSE = replace(LLAMA, ffn_hidden_size=14336, num_query_groups=8, vocab_size=128256)
SPARSE = replace(DENSE, num_moe_experts=64, moe_router_topk=8, moe_ffn_hidden_size=1408, moe_first_dense_layers=1)
RANKS = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
LATENT = replace(SPARSE, multi_latent_attention=True, **RANKS)
TRAIN = train_of(DENSE, global_batch=512, fused_activation=True, transformer_engine=True)


def layout(**counts: Any) -> Layout:
    return layout_of(**{"data": 8.0, "microbatches": 32.0, "sharded_optimizer": 1.0, **counts})


def costs(curve: Curve | None = None) -> Costs:
    kernels = Roofline(chip=CHIP, curve=curve or Curve())
    return Costs(memory=PlainMemory(capacity=80e9), kernels=kernels, collectives=Collectives(topology=TOPOLOGY))


def parts(train: Training = TRAIN, made: Costs | None = None, **counts: float) -> dict[str, float]:
    return {name: float(value[0]) for name, value in step_time(train, layout(**counts), made or costs()).items()}


def total(train: Training = TRAIN, made: Costs | None = None, **counts: float) -> float:
    return sum(parts(train, made, **counts).values())


def with_options(train: Training = TRAIN, **options: object) -> Training:
    return replace(train, options=Options(**options))  # type: ignore[arg-type]


MOE = replace(TRAIN, model=SPARSE)
Job = tuple[Training, dict[str, float]]
ONE: Job = (TRAIN, {})
ADAPTED: Job = (with_options(adapter=Adapter()), {})
SPLIT = {"tensor": 2.0, "sequence_parallel": 1.0, "data": 4.0}
WIDE, DEEP = {"tensor": 8.0, "sequence_parallel": 1.0, "data": 1.0}, {"pipeline": 8.0, "data": 1.0}
FOUR = {"pipeline": 4.0}
FEW, LONG, SHORT = {**DEEP, "microbatches": 16.0}, {**FOUR, "microbatches": 64.0}, {"microbatches": 4.0}
EXPERTS = (MOE, {"expert": 8.0})
FLEX: Job = (with_options(MOE, dispatcher="flex"), EXPERTS[1])
GROUPED = replace(MOE, model=replace(SPARSE, moe_router_num_groups=4, moe_router_group_topk=2))
BIASED = replace(MOE, model=replace(SPARSE, moe_bias=True))
HIDDEN = with_options(overlap_grad_reduce=True, overlap_param_gather=True)
RECOMPUTED = (TRAIN, {**FOUR, "block": 2.0})
COMPARED: dict[str, tuple[str, Job, Job, float, float]] = {
    "full recompute": ("compute_s", (TRAIN, {"uniform": 1.0}), ONE, 1.25, 1.36),
    "overlap of tensor traffic": ("tp_comm_s", (with_options(tp_comm_overlap=True), WIDE), (TRAIN, WIDE), 0.1, 0.99),
    "tensor parallelism between nodes": ("tp_comm_s", (TRAIN, {**WIDE, "tensor": 16.0}), (TRAIN, WIDE), 1.5, 20.0),
    "overlap of gradients slows backward": ("dp_comm_exposed_s", (HIDDEN, SHORT), (TRAIN, SHORT), 0.001, 0.5),
    "fewer bytes per gradient": ("dp_comm_exposed_s", (with_options(grad_bytes=2), {}), ONE, 0.4, 0.99),
    "bubble of more micro-batches": ("bubble", (TRAIN, {**DEEP, "microbatches": 64.0}), (TRAIN, FEW), 0.1, 0.4),
    "bubble of virtual stages": ("bubble", (TRAIN, {**FEW, "virtual": 4.0}), (TRAIN, FEW), 0.1, 0.5),
    "bubble of ZB-H1": ("bubble", (with_options(schedule="zb-h1"), FEW), (TRAIN, FEW), 0.1, 0.6),
    "bubble of ZB-2p": ("bubble", (with_options(schedule="zb-2p"), FEW), (TRAIN, FEW), 0.0, 0.3),
    "slowest stage": ("step", (TRAIN, {**LONG, "first_layers": 14.0, "last_layers": 6.0}), (TRAIN, LONG), 1.2, 2.0),
    "recompute of some layers": ("step", RECOMPUTED, (TRAIN, FOUR), 1.001, 1.36),
    "recompute of all layers": ("step", (TRAIN, {**FOUR, "uniform": 1.0}), RECOMPUTED, 1.001, 1.36),
    "virtual stages hide messages": (
        *("pp_comm_s", (with_options(overlap_p2p_comm=False), {**FOUR, "virtual": 4.0})),
        *((TRAIN, {**FOUR, "virtual": 4.0}), 10.0, 1e3),
    ),
    "narrow formats, not in attention": ("compute_s", (replace(TRAIN, precision="fp8"), {}), ONE, 0.5, 0.9),
    "overlap of experts": ("ep_comm_s", (with_options(MOE, overlap_expert_comm=True), EXPERTS[1]), EXPERTS, 0.05, 0.5),
    "copies of dispatchers": ("ep_comm_s", FLEX, EXPERTS, 0.1, 0.99),
    "tokens in 8 bits": ("ep_comm_s", (with_options(MOE, dispatch_share=0.5), EXPERTS[1]), EXPERTS, 0.8, 0.95),
    "copies between nodes": (
        *("ep_comm_s", (with_options(MOE, dispatcher="flex", linked_devices=8.0), {**EXPERTS[1], "expert": 16.0})),
        *((with_options(MOE, dispatcher="flex"), {**EXPERTS[1], "expert": 16.0}), 0.2, 0.335),  # 0.341 to all devices
    ),
    "groups of experts": ("ep_comm_s", (with_options(GROUPED, dispatcher="flex"), EXPERTS[1]), FLEX, 0.5, 0.9),
    "neighbouring experts": (
        *("ep_comm_s", (with_options(MOE, dispatcher="flex", neighbours=True), EXPERTS[1]), FLEX, 0.2, 0.9),
    ),
    "head in 8 bits": (*("compute_s", (with_options(TRAIN, mxfp8_modules=frozenset({"head"})), {}), ONE, 0.5, 0.999),),
    "busiest expert": ("step", (with_options(MOE, expert_imbalance=1.5), EXPERTS[1]), EXPERTS, 1.1, 1.6),
    "launches of single experts": ("step", (with_options(MOE, grouped_gemm=False), {}), (MOE, {}), 1.0001, 20.0),
    "biases of experts": ("compute_s", (BIASED, EXPERTS[1]), EXPERTS, 1.001, 2.0),
    "biases in 32 bits": ("compute_s", (with_options(BIASED, dispatcher="flex"), EXPERTS[1]), FLEX, 1.002, 3.0),
    "biases of single experts": (
        *("compute_s", (with_options(BIASED, grouped_gemm=False), {})),
        *((with_options(MOE, grouped_gemm=False), {}), 1.0, 1.0001),
    ),
    "gradients of adapters": ("compute_s", (with_options(adapter=Adapter()), {}), ONE, 0.67, 0.97),
    "wider adapters": ("compute_s", (with_options(adapter=Adapter(rank=512)), {}), ADAPTED, 1.05, 1.5),
    "adapters of fewer layers": (
        *("compute_s", (with_options(adapter=Adapter(targets=("o_proj",))), {}), ADAPTED, 0.8, 0.99),
    ),
    "magnitudes of adapters": ("compute_s", (with_options(adapter=Adapter(kind="dora")), {}), ADAPTED, 1.05, 1.5),
    "quantized weights": ("compute_s", (with_options(adapter=Adapter(base="nf4")), {}), ADAPTED, 1.001, 1.2),
    "gathered adapters": (
        *("tp_comm_s", (with_options(adapter=Adapter(), joint_adapters=True), SPLIT), (ONE[0], SPLIT), 1.1, 2.0),
    ),
    "exchange of adapters": ("dp_comm_exposed_s", (with_options(adapter=Adapter()), {}), ONE, 0.0001, 0.2),
    "state over more ranks": ("optimizer_s", (TRAIN, {"data": 64.0}), ONE, 0.05, 0.99),
    "state on each rank": ("optimizer_s", (TRAIN, {"sharded_optimizer": 0.0}), ONE, 1.01, 20.0),
    "optimizer on the host": ("optimizer_s", (with_options(optimizer_offload_fraction=1.0), {}), ONE, 2.0, 1e3),
    "garbage each step": ("optimizer_s", (with_options(gc_interval=1), {}), ONE, 1.1, 1e3),
    "context ranks": ("compute_s", (TRAIN, {"data": 1.0, "context": 8.0, "micro_batch": 8.0}), ONE, 1.0001, 1.2),
}
"""A part of the step, two jobs, and the bounds of the first job's figure over the second's."""


@pytest.mark.parametrize("name", COMPARED)
def test_one_job_takes_longer_or_shorter_than_another(name: str) -> None:
    part, first, second, low, high = COMPARED[name]
    assert low <= figure(part, *first) / figure(part, *second) < high


def figure(name: str, train: Training, counts: dict[str, float]) -> float:
    found = parts(train, **counts)
    step = sum(found.values())
    return {**found, "step": step, "bubble": found["pp_bubble_s"] / step}[name]


def test_a_step_without_expert_parallelism_dispatches_no_tokens() -> None:
    assert parts(MOE)["ep_comm_s"] == 0


@pytest.mark.parametrize(
    ("layers", "schedule", "counts"),
    [(128, "zb-h1", {"pipeline": 128.0, "microbatches": 256.0}), (2, None, {"pipeline": 4.0, "microbatches": 8.0})],
)
def test_pipelines_with_one_layer_or_none_on_a_stage_have_a_time(
    layers: int, schedule: str | None, counts: dict[str, float]
) -> None:
    deep = replace(TRAIN, model=replace(DENSE, num_layers=layers), options=Options(schedule=schedule))
    assert np.isfinite(total(deep, **counts))


def test_only_the_alltoall_dispatcher_sorts_tokens_if_a_rank_has_several_experts() -> None:
    flex = replace(MOE, options=replace(MOE.options, dispatcher="flex"))
    for expert, sorts in ((1.0, True), (float(MOE.model.num_moe_experts or 0), False)):
        made = costs(Curve(launch_seconds=0.0))
        busy = [parts(train, made, data=64.0, expert=expert)["compute_s"] for train in (MOE, flex)]
        assert (busy[0] > busy[1]) == sorts


@pytest.mark.parametrize("module", ["core_attn", "layernorm", "mlp", "mla_up_proj"])
def test_selective_recompute_costs_something_and_less_than_full(module: str) -> None:
    plain = replace(TRAIN, model=mixed(DENSE, COMPRESSED, 32)) if module == "mla_up_proj" else TRAIN
    chosen = with_options(plain, recompute_modules=frozenset({module}))
    assert total(plain) < total(chosen, selective=1.0) < total(plain, uniform=1.0)


def test_small_layers_wait_for_the_host_and_graphs_do_not() -> None:
    shape = {"hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 4}
    small = replace(TRAIN, model=replace(DENSE, **shape), sequence=256)
    slow, quick = costs(Curve(launch_seconds=50e-6)), costs(Curve(launch_seconds=1e-7))
    assert total(small, slow) > 3 * total(small, quick)
    graphed = replace(small, options=Options(graphs=WHOLE_STEP))
    assert total(graphed, slow) == pytest.approx(total(graphed, quick), rel=0.05)


@pytest.mark.parametrize("model", [SPARSE, LATENT])
def test_each_part_in_a_graph_is_launched_faster_unless_its_layer_is_recomputed(model: Model) -> None:
    slow, captured = costs(Curve(launch_seconds=1e-3)), frozenset[str]()
    eager = replace(TRAIN, model=model, transformer_engine=True)
    times = [total(eager, slow, expert=8.0)]
    for part in ("attn", "moe_router", "moe_preprocess", "moe"):
        captured |= {part}
        times.append(total(with_options(eager, graphs=captured), slow, expert=8.0))
    assert times == sorted(set(times), reverse=True)
    whole = [total(with_options(eager, graphs=each), slow, expert=8.0, uniform=1.0) for each in (captured, frozenset())]
    assert whole[0] == whole[1]


@pytest.mark.parametrize("module", ["layernorm", "moe_act"])
def test_a_recomputed_module_of_experts_is_launched_unless_by_a_graph(module: str) -> None:
    eager = with_options(replace(MOE, transformer_engine=True), recompute_modules=frozenset({module}))
    graphs, slow = with_options(eager, graphs=frozenset({"attn", "mlp", "moe"})), costs(Curve(launch_seconds=1e-3))
    added = [total(each, slow, expert=8.0, selective=1.0) - total(each, slow, expert=8.0) for each in (eager, graphs)]
    assert added[0] > 10 * added[1]


@pytest.mark.parametrize(("expert", "load"), [(1.0, 1.0), (8.0, 1.166), (64.0, 1.772)])
def test_busiest_rank_of_natural_routing_has_the_largest_of_normal_loads(expert: float, load: float) -> None:
    assert layout(expert=expert).busiest(Options(routing_spread=0.33), 64)[0] == pytest.approx(load, abs=0.01)
    assert total(with_options(MOE, routing_spread=0.33), expert=expert) >= total(MOE, expert=expert)


def test_latent_attention_and_an_unfused_router_launch_more_kernels_and_hybridep_fewer() -> None:
    slow, sparse = costs(Curve(launch_seconds=1e-3)), replace(MOE, transformer_engine=True)
    latent = replace(sparse, model=replace(LATENT, num_layers=SPARSE.num_layers))
    plain = total(sparse, slow, expert=8.0)
    assert total(latent, slow, expert=8.0) > 1.1 * plain
    wide = replace(latent, model=replace(latent.model, qk_head_dim=1, qk_pos_emb_head_dim=191))  # as much is rotated
    part, most = (
        total(with_options(each, rope_fusion=False)) - total(with_options(each, rope_fusion=True))
        for each in (latent, wide)
    )
    assert 0.0 < part < 0.7 * most
    switched: list[dict[str, Any]] = [{name: True} for name in ("router_fusion", "padded_experts")]
    for options in (*switched, {"router_loss": False}, {"dispatcher": "flex"}, {"dispatcher": "hybridep"}):
        assert (fewer := total(with_options(sparse, **options), slow, expert=8.0)) < plain
    assert fewer < total(with_options(sparse, dispatcher="flex"), slow, expert=8.0)


def test_fused_experts_of_narrow_formats_save_traffic_and_launches() -> None:
    slow, sparse = costs(Curve(launch_seconds=1e-3)), replace(MOE, transformer_engine=True)
    for precision, saves in (("bf16", False), ("mxfp8", True)):
        train = replace(sparse, precision=precision)
        fused = with_options(train, fused_experts=True)
        assert (total(fused) < total(train)) is saves
        assert (total(fused, slow) < 0.98 * total(train, slow)) is saves


def test_a_ring_uses_one_link_of_a_full_mesh_and_ulysses_all() -> None:
    node, *others = TOPOLOGY.levels
    node = replace(node, bytes_per_second=200e9, pair_share=1 / 7)
    mesh = replace(costs(), collectives=Collectives(topology=Topology(levels=(node, *others))))
    train = replace(TRAIN, model=replace(DENSE, num_query_groups=32), sequence=32768)
    ring, ulysses = (total(with_options(train, cp_comm=each), mesh, context=8.0, data=1.0) for each in ("p2p", "a2a"))
    assert ring > 1.1 * ulysses


def test_a_single_rank_has_no_wait_time() -> None:
    counts = {"tensor": 4.0, "sequence_parallel": 1.0, "pipeline": 4.0, "data": 2.0}
    compute, optimizer = rank_time(TRAIN, layout(**counts), costs(), np.array([1.0]))
    step = parts(**counts)
    assert compute[0] <= step["compute_s"] * 1.001
    assert optimizer[0] <= step["optimizer_s"]
    last, _ = rank_time(TRAIN, layout(**counts), costs(), np.array([3.0]))
    assert last[0] > compute[0]


def test_offloaded_activations_cost_nothing_behind_kernels_and_a_lot_over_a_slow_link() -> None:
    away = with_options(offload_modules=frozenset({"core_attn", "attn_proj"}))
    quick, slow = costs(Curve(host_bytes_per_second=500e9)), costs(Curve(host_bytes_per_second=1e9))
    assert total(away, quick) == pytest.approx(total(TRAIN, quick))
    assert total(away, slow) > 1.5 * total(TRAIN, slow)


def test_fully_sharded_weights_are_gathered_for_each_micro_batch() -> None:
    sharded = with_options(fsdp=True)
    few, many = (parts(sharded, data=64.0, microbatches=count)["dp_comm_exposed_s"] for count in (4.0, 16.0))
    assert many == pytest.approx(4 * few)


def test_combinations_are_distinguished_regardless_of_their_size() -> None:
    large = [[1.0, 4096.0, 4096.0], [2.0**20, 2.0**20, 2.0**19], [2.0**22] * 3]
    first, which = distinct([np.array(column) for column in large])
    assert len(first) == 3
    assert len(set(which.tolist())) == 3


def test_groups_without_a_topology_do_not_slow_compute() -> None:
    bare = replace(costs(), collectives=Collectives(topology=Topology(levels=())))
    overlapping = with_options(overlap_grad_reduce=True)
    assert np.isnan(total(overlapping, bare))
    assert np.isfinite(total(overlapping, bare, data=1.0))


def test_model_flops_of_weights_that_adapters_leave_alone_need_no_gradients_of_weights() -> None:
    """6 flops a weight and token, 4 without its gradient; causal attention's scores take as many as ever."""
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    every, tokens = model_flops(TRAIN), TRAIN.sequence * TRAIN.global_batch
    with_adapters = model_flops(with_options(adapter=Adapter()))
    assert every - with_adapters == pytest.approx(2.0 * weights * tokens)
    assert with_adapters == pytest.approx(tokens * (4.0 * weights + 6.0 * 32 * 4096 * TRAIN.sequence))


def test_a_slow_network_delays_stages_that_share_a_node() -> None:
    def step(rate: float) -> float:
        network = replace(TOPOLOGY.levels[1], bytes_per_second=rate)
        slow = Collectives(topology=Topology(levels=(TOPOLOGY.levels[0], network)))
        return total(made=replace(costs(), collectives=slow), data=4.0, pipeline=16.0)

    assert step(1e6) > 10 * step(50e9)


def test_isolated_kernel_times_are_scaled_in_a_step_but_not_in_a_rank() -> None:
    isolated = replace(costs(), run_slowdown=1.25)
    assert parts(made=isolated)["compute_s"] == pytest.approx(1.25 * parts()["compute_s"], rel=0.02)
    first, second = (rank_time(TRAIN, layout(), result, np.zeros(1)) for result in (costs(), isolated))
    assert [part.tolist() for part in first] == [part.tolist() for part in second]
    assert costs_in_run(isolated).kernels.launch_seconds() > isolated.kernels.launch_seconds()


def test_layers_with_windows_compute_only_the_scores_within_them() -> None:
    full = replace(TRAIN, sequence=131072)
    windowed = replace(full, model=mixed(DENSE, {"window": 1024}, 24))
    whole = replace(full, model=mixed(DENSE, {"window": 131072}, 24))
    assert total(windowed) < 0.5 * total(full)
    assert model_flops(windowed) < 0.5 * model_flops(full)
    assert total(whole) == pytest.approx(total(full))


MAMBA = Mamba2(num_heads=128, head_dim=64, state_size=128)


def test_a_layer_with_a_state_takes_its_products_and_no_longer_in_longer_sequences() -> None:
    def step(model: Model, sequence: int) -> float:
        return total(replace(TRAIN, model=model, sequence=sequence)) / sequence

    half, whole = (mixed(DENSE, MAMBA, number) for number in (16, 32))
    assert step(half, 4096) == pytest.approx((step(whole, 4096) + step(DENSE, 4096)) / 2, rel=0.05)
    assert step(whole, 65536) == pytest.approx(step(whole, 8192), rel=0.05)
    assert step(DENSE, 65536) > 1.5 * step(DENSE, 8192)


def test_multi_token_prediction_takes_a_layer_with_attention_and_not_the_mean_layer() -> None:
    def depth(layers: int, **options: object) -> float:
        model = mixed(DENSE, MAMBA, layers)
        train = replace(with_options(replace(TRAIN, model=model), **options), precision="fp8")
        return total(replace(train, model=replace(model, mtp_num_layers=1))) - total(train)

    assert depth(16) == pytest.approx(depth(31), rel=0.01)
    assert depth(16, wide_mtp=True) > 1.05 * depth(16)


@pytest.mark.parametrize("model", [DENSE, SPARSE])
@pytest.mark.parametrize("repeated", [False, True])
def test_the_gradients_of_multi_token_prediction_are_summed_once(model: Model, repeated: bool) -> None:
    plain = replace(model, mtp_num_layers=2, mtp_use_repeated_layer=repeated)
    described = replace(plain, layers=layers_of(plain))
    assert total(replace(TRAIN, model=described)) == pytest.approx(total(replace(TRAIN, model=plain)), rel=1e-12)


def test_layers_in_16_bits_take_their_share_of_a_job_in_8_bits() -> None:
    narrow, half, whole = (total(with_options(replace(TRAIN, precision="fp8"), wide_layers=n)) for n in (0, 16, 32))
    assert half == pytest.approx((narrow + whole) / 2, rel=0.01)
    assert whole == pytest.approx(total(), rel=0.01)


def test_modules_in_more_bits_take_longer() -> None:
    mamba, latent = mixed(DENSE, MAMBA, 16), replace(SPARSE, moe_latent_size=512)
    for model, options in (
        (DENSE, {"wide_modules": frozenset({"attention"})}),
        (latent, {"wide_modules": frozenset({"latent"})}),
        (mamba, {"mxfp8_modules": frozenset({"mixer_output"})}),
    ):
        narrow, wide, plain = (
            replace(with_options(replace(TRAIN, model=model), **each), precision=precision)
            for each, precision in (({}, "nvfp4"), (options, "nvfp4"), (options, "bf16"))
        )
        kernels = Roofline(chip=tasks.chip(bf16=9e14, fp8=1.8e15, fp4=3.6e15), curve=Curve())
        assert total(narrow, replace(costs(), kernels=kernels)) < total(wide, replace(costs(), kernels=kernels))
        assert total(plain) == total(replace(plain, options=Options()))


def test_sparse_attention_without_its_kernels_computes_all_scores() -> None:
    sparse = mixed(DENSE, {"indexer": Indexer(heads=32, head_dim=128, top_k=256)}, 32)
    fused, unfused = (total(with_options(replace(TRAIN, model=sparse), sparse_kernels=each)) for each in (True, False))
    assert fused < total(TRAIN)
    assert unfused > 1.5 * total(TRAIN)
    trained = with_options(replace(TRAIN, model=sparse), indexer_loss=True)
    assert total(trained) > 1.3 * unfused


def test_grouped_products_launch_a_kernel_for_each_expert_and_linear_layer() -> None:
    job, layer = replace(MOE, transformer_engine=True), layers_of(MOE.model)[-1]

    def launches(adapter: Adapter | None = None, precision: str = "bf16") -> list[float]:
        given = replace(with_options(job, adapter=adapter), precision=precision)
        found = layer_time(given, LayerLayout.of(given, layout_of(expert=[1, 4])), plain_costs(), layer)
        return [float(each[0] - each[1]) for each in (found.forward.launches, found.backward.launches)]

    fewer = 0.75 * (MOE.model.num_moe_experts or 0)
    assert launches() == launches(precision="nvfp4") == [fewer * 2, fewer * 4]
    assert launches(precision="mxfp8") == [fewer * (2 + 2), fewer * (4 + 2)]  # casts
    assert launches(Adapter(targets=("down_proj",)))[0] == fewer * (2 + 2)
