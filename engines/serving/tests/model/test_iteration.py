"""Seconds of iterations: what more tokens, devices and narrower weights do; and the memory of a server."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from flagcore_models.catalogue import public_model
from flagcore_models.layers import layers_of, parameters
from flagcore_models.mixers.attention import Indexer
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.public import find_public
from flagcore_serving.model.experts import imbalance
from flagcore_serving.model.iteration import NODES, interpolate, iteration_costs
from flagcore_serving.model.memory import ServingMemory, expert_bytes, serving_memory, token_bytes, weight_bytes
from flagcore_serving.model.price import Lane, Price
from flagcore_serving.model.work import Serving, SparseKernel, distinct_experts

from engines.models.tests.examples import mixed
from flagcore.contracts import Costs
from flagcore.domain.chip import with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.model import Model
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.roofline import Roofline
from tests.product.serving_inputs import CHIP, DENSE, EXPERTS, LATENT, OVER, costs, settings, times


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=lambda model: model.name)
def test_more_tokens_never_take_less(model: object) -> None:
    found = times(model, tensor=[1.0, 2.0, 4.0])
    for table in (found.local, found.shared, found.sampled):
        assert (np.diff(table, axis=1) >= -1e-12).all()


def test_decoding_one_sequence_reads_the_weights_once() -> None:
    found = times(overheads=replace(OVER, attention=0.0, ffn=0.0))
    read = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288) * 2 / 3e12
    assert read < found.local[0, 0] < 1.35 * read


HOSTS = NodeGroup(chip=with_network(CHIP, 50e9), nodes=8, devices_per_node=8)
NETWORK = replace(costs(), collectives=Collectives(topology=topology_of(HOSTS)))
"""Costs on eight hosts."""
LARGE = NODES[-1]
INDEXED = {"indexer": Indexer(heads=32, head_dim=128, top_k=2048)}
SCORES = Indexer(heads=0, head_dim=0, top_k=2048)
WINDOWS = {"model": mixed(DENSE, {"window": 1024}, 36), "tokens": 4096.0, "prompt": 2048.0}
KIMI = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
STATES = GatedDeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
LINEAR = {"model": mixed(DENSE, STATES, 27), "tokens": 1e4}
SLOW_RULE = {"overheads": replace(OVER, delta_rule=3.0)}
SPARSE = {"model": mixed(LATENT, INDEXED, 36)}
SHORT, LONG = ({**SPARSE, "tokens": tokens, "prompt": tokens} for tokens in (1024.0, 65536.0))
LAUNCHED = {"overheads": replace(OVER, eager_kernels=0.0, eager_latent=60.0)}
SPLIT_LATENT = {"model": LATENT, "tensor": 8}
OF_TENSOR, OF_DATA = ({"model": EXPERTS, "expert": 2, ranks: 2} for ranks in ("tensor", "data"))
SLOWER = {"overheads": replace(OVER, exchanged_share=0.5)}
WIDE = {"model": EXPERTS, "precision": "fp8", "data": 64, "expert": 64, "on": NETWORK, "at": 16384}
SENT = {**WIDE, "exchanges": True}


def seconds(part: str, at: float = 1.0, on: Costs | None = None, **given: Any) -> float:
    """A part of an iteration of `at` tokens: bf16 on one device, but for what is given."""
    names = {*Serving._fields} & {*given}
    serving = {"model": DENSE, "precision": "bf16", "overheads": OVER, **{name: given.pop(name) for name in names}}
    found = getattr(iteration_costs(Serving(**serving), settings(**given), on or costs()), part)[0]
    return float(np.interp(at, NODES, found) if np.ndim(found) else found)


@pytest.mark.parametrize(
    ("part", "before", "after", "low", "high"),
    [
        ("local", {}, {"precision": "fp8"}, 0.4, 0.7),
        ("local", {"tensor": 1}, {"tensor": 2}, 0.4, 0.99),
        # all stages wait for those with 8 of 36 layers, or for the last one, with the output head
        ("cached", {}, {"pipeline": 5}, 40.0 / 36.0, 40.0 / 36.0),
        ("sampled", {}, {"pipeline": 5}, 5.0, 5.0),
        ("messages", {"tensor": 2}, {"tensor": 2, "bus_ranks": 2.0}, 1.0, 1.0),
        ("messages", {"tensor": 2}, {"tensor": 2, "bus_ranks": 1.0}, 1.0001, 100.0),
        ("messages", {"tensor": 4}, {"tensor": 4, "bus_ranks": 2.0}, 1.0001, 100.0),
        ("messages", {"tensor": 4}, {"tensor": 4, "link_domain": 2}, 1.0001, 100.0),  # over a network
        ("local", {"devices": 4}, {}, 4.0, 4.0),
        # weights that are only stored narrower are read faster, but computed in the wider format
        ("local", {}, {"weight_bytes": 0.5}, 0.1, 0.5),
        ("local", {"at": LARGE}, {"at": LARGE, "weight_bytes": 0.5}, 0.9, 1.1),
        # a pass of at most 512 tokens
        ("local", {"pass_tokens": 512, "at": 512}, {"pass_tokens": 512, "at": 2048}, 4.0, 4.0),
        ("local", {"at": 2048}, {"pass_tokens": 512, "at": 2048}, 1.001, 4.0),
        # messages between stages
        ("local", {"at": 128}, {"pipeline": 2, "at": 128}, 1.0001, 2.0),
        ("messages", {"pipeline": 2, "at": 128}, {"pipeline": 3, "at": 128}, 2.0, 2.0),
        # key and value heads are repeated beyond their number, and a latent is on each rank
        ("cached", {"tensor": 4}, {"tensor": 8}, 0.5, 0.5),
        ("cached", {"tensor": 8}, {"tensor": 16}, 0.9, 1.01),
        ("cached", {"model": LATENT}, {"model": LATENT, "tensor": 8}, 0.8, 1.01),
        ("cached", SPLIT_LATENT, {**SPLIT_LATENT, "sharing": 8.0}, 0.125, 0.999),
        ("sampled", SPLIT_LATENT, {**SPLIT_LATENT, "sharing": 8.0}, 1.001, 100.0),
        ("cached", {}, {"cache_element_bytes": 1.0}, 0.5, 0.5),
        # sliding windows, linear attention, and sparse attention
        ("cached", {}, WINDOWS, 0.25, 0.25),
        ("pair", {}, WINDOWS, 0.75, 0.75),
        ("pair", {}, LINEAR, 0.25, 0.25),
        ("local", {"at": LARGE}, {**LINEAR, "at": LARGE}, 0.8, 2.0),
        ("local", {**LINEAR, "at": LARGE}, {**LINEAR, **SLOW_RULE, "at": LARGE}, 1.2, 3.0),
        *((part, {"model": LATENT}, SHORT, 1.0001, 10.0) for part in ("cached", "pair")),
        *((part, {"model": LATENT}, LONG, 0.0, 0.9999) for part in ("cached", "pair")),
        ("local", SHORT, {**SHORT, "overheads": replace(OVER, indexer=1.0)}, 100.0, 1e9),
        ("local", {"model": LATENT}, {"model": mixed(LATENT, {"indexer": SCORES}, 36)}, 1.0, 1.01),  # no products
        ("floor", {**LAUNCHED, "model": mixed(LATENT, STATES, 27)}, {**LAUNCHED, "model": LATENT}, 4.0, 4.0),
        # experts: few tokens use few of them, ranks exchange tokens, and kernels behind the exchange are slower
        ("shared", {"model": EXPERTS, "at": 128}, {"model": EXPERTS}, 0.0, 0.5),
        ("shared", OF_TENSOR, {**OF_TENSOR, "balanced": True}, 0.5, 0.9999),  # a tensor rank with busy experts
        ("shared", {**OF_TENSOR, "at": LARGE}, {**OF_TENSOR, **SLOWER, "at": LARGE}, 1.0, 1.0),
        ("shared", {**OF_DATA, "at": LARGE}, {**OF_DATA, **SLOWER, "at": LARGE}, 1.3, 1.99),
        # tokens sent to their experts only, with and without copies of the busy ones
        ("shared", WIDE, {**SENT, "balanced": True}, 0.0, 0.5),
        ("shared", SENT, {**SENT, "balanced": True}, 0.0, 0.8),
        ("shared", {**SENT, "balanced": True}, {**SENT, "balanced": True, "copies": 128}, 1.001, 3.0),
    ],
)
def test_a_part_of_an_iteration_changes_by_a_factor(
    part: str, before: dict[str, Any], after: dict[str, Any], low: float, high: float
) -> None:
    factor = seconds(part, **after) / seconds(part, **before)
    assert factor == pytest.approx(low) if low == high else low < factor < high


def test_states_of_linear_attention_are_read_and_written_per_token() -> None:
    states_s = 27 * 2 * STATES.state_bytes / 1e4 / 3e12
    assert seconds("cached", **LINEAR) == pytest.approx(seconds("cached") / 4 + states_s, rel=0.1)


def test_only_ranks_that_exchange_all_prompts_may_sum_them() -> None:
    sums = {"overheads": replace(OVER, sums_prompts=True), "model": EXPERTS, "at": LARGE}
    assert seconds("summed", **sums, data=8) > 0.25 * seconds("exchanged", **sums, data=8)
    for other in ({"tensor": 8}, {"data": 8, "exchanges": True}, {"data": 8, "overheads": OVER}):
        assert seconds("summed", **{**sums, **other}) == 0.0


BLOCKS = SparseKernel(architecture="new", heads=64, rate=0.5)


@pytest.mark.parametrize(
    ("kernel", "given", "cached", "pair"),  # operations of a token relative to those of 64 heads and 2,048 tokens
    [
        (BLOCKS, LONG, 1.0, 1.0),
        (BLOCKS, {**LONG, "tensor": 4}, 1.0, 1.0),  # 8 heads of a rank take as long as 64
        (BLOCKS._replace(heads=16), LONG, 0.5, 0.5),
        (BLOCKS, SHORT, 1.0, 1.0),
        (BLOCKS._replace(skips=True), SHORT, 0.5, 0.25),
        (BLOCKS._replace(prompts=False), LONG, 1.0, None),
        (BLOCKS._replace(answers=False), LONG, None, 1.0),
        (BLOCKS._replace(architecture="old"), LONG, None, None),
        (BLOCKS._replace(least=128), LONG, None, None),
        (BLOCKS, {**LONG, "cache_element_bytes": 1.0}, None, None),
    ],
)
def test_a_kernel_of_selected_tokens_computes_blocks_of_heads(
    kernel: SparseKernel, given: dict[str, Any], cached: float | None, pair: float | None
) -> None:
    given = {**given, "architecture": "new", "peak": 1e15}
    of_token = 36 * 64 * 2048 * 2 * (512 + 64 + 512) / (0.5 * 1e15)
    for part, share, pairs in (("cached", cached, 1.0), ("pair", pair, 2.0)):
        plain, found = (seconds(part, **given, overheads=replace(OVER, sparse=each)) for each in ((), (kernel,)))
        indexer = {**given, "model": mixed(LATENT, {"indexer": SCORES}, 36)}
        scores = seconds(part, **given) - seconds(part, **indexer)
        expected = plain if share is None else scores + pairs * share * of_token / given["tokens"]
        assert found == pytest.approx(expected, rel=1e-6)


def test_prompts_that_select_all_tokens_may_have_other_kernels_and_the_last_block_is_waited_for() -> None:
    given = {"architecture": "new", "peak": 1e15}
    dense = {**given, "overheads": replace(OVER, sparse=(BLOCKS,), dense_prompts=True)}
    plain = {**given, "overheads": replace(OVER, sparse=(BLOCKS,))}
    assert seconds("pair", **SHORT, **dense) == seconds("pair", **SHORT)
    assert seconds("pair", **LONG, **dense) != seconds("pair", **LONG)
    waits = {**given, "overheads": replace(OVER, sparse=(BLOCKS._replace(units=100),))}
    block = 36 * 64 * 2048 * 2 * (512 + 64 + 512) * 100 / (0.5 * 1e15)
    for tokens, share in ((1, 0.99), (64, 0.5), (LARGE, 0.5)):  # of 100 units
        wait = seconds("local", tokens, **SHORT, **waits) - seconds("local", tokens, **SHORT, **plain)
        assert wait == pytest.approx(share * block, rel=1e-3)
    moved = costs().kernels.memory_seconds(np.array([1.0, 1.0 + LARGE * 32 * (4 * (512 + 64) + 2 * 512)]))
    added = seconds("local", LARGE, **SHORT, **plain) - seconds("local", LARGE, **SHORT, **given)
    assert added == pytest.approx(36 * float(moved[1] - moved[0]))  # the block has 32 heads that the rank does not have


def test_few_tokens_choose_few_experts() -> None:
    assert distinct_experts(128.0, 8.0, np.array([1.0, 2.0, 1e4])) == pytest.approx([8.0, 15.5, 128.0])


def test_a_crowded_host_takes_longer() -> None:
    found = times(graph_tokens=0, crowding=[1.0, 5.0])
    assert found.local[1] == pytest.approx(found.local[0])
    lane = Lane(budget=8192.0, running=64.0, cache_tokens=1e9)
    over = replace(OVER, request=3e-3, entry=1e-3, prompt_token=1e-6)
    free, crowded = (Price(found, row, lane, over) for row in (0, 1))
    assert crowded.decode(8) == pytest.approx(5 * free.decode(8), rel=1e-2)
    front_end = [
        (each.overheads.request, each.overheads.entry, each.overheads.prompt_token) for each in (free, crowded)
    ]
    assert front_end[1] == pytest.approx([5 * seconds for seconds in front_end[0]])


def test_batches_without_a_graph_wait_for_the_host() -> None:
    found = times(graph_tokens=[512, 0])
    lane = Lane(budget=8192.0, running=64.0, cache_tokens=1e9)
    captured, eager = (Price(found, row, lane, OVER) for row in (0, 1))
    assert eager.decode(1) > 2 * captured.decode(1)
    host = 1e-3 + 36 * 60 * 11e-6
    assert eager.decode(1) == pytest.approx(host, rel=1e-2)
    assert captured.mixed(0, 513.0, 513.0, 0.0, 1) == pytest.approx(host, rel=1e-2)
    over = replace(OVER, layer=1e-3, launch=22e-6)
    whole, pieces = (Price(times(overheads=over, whole=[1.0, 0.0]), row, lane, over) for row in (0, 1))
    assert whole.decode(1) == pytest.approx(captured.decode(1))
    assert [whole.mixed(1, 8.0, 8.0, 0.0, 1), pieces.decode(1)] == pytest.approx([37e-3] * 2, rel=1e-2)
    assert whole.mixed(0, 513.0, 513.0, 0.0, 1) == pytest.approx(2 * host - 1e-3, rel=1e-2)
    mixers = replace(DENSE, layers=tuple(replace(each, network=None) for each in layers_of(DENSE)))
    halves = Price(times(model=mixers, graph_tokens=[0, 0]), 0, lane, OVER)  # the layers of Nemotron-H
    assert halves.decode(1) == pytest.approx(1e-3 + (host - 1e-3) / 2.0, rel=1e-2)


def test_tables_are_interpolated_and_zero_work_takes_no_time() -> None:
    table = times().local
    result = interpolate(np.repeat(table, 3, axis=0), np.array([0.0, 64.0, 80.0]))
    low, high = table[0, NODES.tolist().index(64)], table[0, NODES.tolist().index(96)]
    assert result == pytest.approx([0.0, low, 0.5 * (low + high)])


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=lambda model: model.name)
def test_a_chip_without_bf16_serves_in_fp16(model: Model) -> None:
    rate = CHIP.dense_flops_per_second["bf16"]
    older = replace(costs(), kernels=Roofline(chip=replace(CHIP, dense_flops_per_second={"fp16": rate})))
    found = iteration_costs(Serving(model=model, precision="fp16", overheads=OVER), settings(), older)
    assert found.local == pytest.approx(times(model).local)
    assert found.cached == pytest.approx(times(model).cached)


def test_overlapping_the_exchange_helps_large_batches_but_hides_at_most_the_shorter_part() -> None:
    layout = {**WIDE, "exchanges": True, "balanced": True}
    del layout["at"]
    whole, hidden = (
        seconds("local", **layout, at=LARGE / 64) + seconds("shared", **layout, at=LARGE, overlaps=each)
        for each in (False, True)
    )
    assert 0.5 * whole < hidden < whole


def test_ranks_have_their_own_hosts_and_graphs() -> None:
    found = times(EXPERTS, data=8.0, expert=8.0, graph_tokens=512)
    lane = Lane(budget=1e9, running=1e9, cache_tokens=1e9, ranks=8.0)
    price = Price(found, 0, lane, OVER)
    alone = Price(found, 0, replace(lane, ranks=1.0), OVER)
    assert price.decode(4096) < alone.decode(4096)
    device = interpolate(found.local + found.sampled, np.array([512.0])) + interpolate(found.shared, np.array([4096.0]))
    assert price.decode(4096) == pytest.approx(device[0] + found.fixed[0] + 512 * found.sequence[0])


GIB = 2**30


def serving(model: object = DENSE, precision: str = "bf16", **arguments: object) -> Serving:
    return Serving(model=model, precision=precision, overheads=replace(OVER, **arguments))


def memory(of: Serving, budget: float = 72e9, **arguments: object) -> ServingMemory:
    held = costs()
    outside = 0.0 if of.overheads.activations_beside else held.memory.device_used_bytes(np.zeros(1))
    share = (budget + outside) / held.memory.capacity_bytes()
    return serving_memory(of, settings(memory_fraction=share, **arguments), held)


def test_the_weights_of_an_8b_model_have_the_size_of_its_files() -> None:
    assert weight_bytes(serving(), settings())[0] == pytest.approx(16.38e9, rel=0.002)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3.2", KIMI, "openai/gpt-oss-20b", "google/gemma-4-E2B"])
def test_a_device_alone_has_all_weights_of_a_model(name: str) -> None:
    model = public_model(name)
    assert model is not None
    assert weight_bytes(serving(model), settings()) == pytest.approx(2 * parameters(model), rel=1e-12)


def test_layers_that_are_prefetched_leave_their_memory_to_the_cache() -> None:
    device, host = (memory(serving(), prefetched=each) for each in (0.0, 0.25))
    assert host.cache - device.cache == pytest.approx(0.25 * (16.38e9 - 2 * 2 * 151936 * 4096), rel=0.01)


def test_experts_on_the_host_leave_their_memory_to_the_cache() -> None:
    device, host = (memory(serving(EXPERTS), experts_on_host=each) for each in (0.0, 27.0))
    assert host.cache - device.cache == pytest.approx(27 * 3 * 4096 * 768 * 128 * 2)
    assert device.weights - host.weights == pytest.approx(host.cache - device.cache)


def test_weights_are_split_over_tensor_ranks_and_stages() -> None:
    found = weight_bytes(serving(), settings(tensor=[1.0, 2.0, 1.0], pipeline=[1.0, 1.0, 2.0]))
    assert found[1] == pytest.approx(0.5 * found[0])
    assert 0.5 * found[0] <= found[2] < 0.6 * found[0]


def test_experts_are_split_over_attention_ranks_too() -> None:
    one, four = weight_bytes(serving(EXPERTS), settings(data=[1.0, 4.0]))
    experts = 36 * 3 * 4096 * 768 * 128 * 2
    assert one - four == pytest.approx(0.75 * experts)


def test_ranks_with_whole_experts_wait_for_the_busiest_even_if_they_gather_all_tokens() -> None:
    experts = serving(EXPERTS).experts
    assert experts is not None
    layouts = settings(data=[4.0, 4.0, 4.0], expert=[1.0, 4.0, 4.0], exchanges=[False, False, True])
    without, gathered, sent = imbalance(experts, layouts)
    assert 1.0 == without < gathered == sent


def test_experts_may_have_a_format_of_their_own() -> None:
    config, form = find_public("deepseek-ai/DeepSeek-V4-Flash") or ({}, None)
    assert (form, config["expert_dtype"]) == ("fp8", "fp4")
    assert "expert_dtype" not in (find_public("deepseek-ai/DeepSeek-V4-Flash-Base") or ({}, None))[0]
    of = serving(EXPERTS, precision="fp8")
    narrow, own = (
        weight_bytes(each, settings())[0] for each in (of, of._replace(parts={"experts": ("bf16", 17 / 32, 17 / 32)}))
    )
    assert narrow - own == pytest.approx(36 * 3 * 4096 * 768 * 128 * (1.0 - 17 / 32))


def test_attention_may_have_a_format_of_its_own() -> None:
    config, form = find_public("nvidia/Qwen3.6-27B-NVFP4") or ({}, None)
    assert (form, config["quantization_config"]["attention_dtype"]) == ("nvfp4", "fp8")
    of = serving(precision="nvfp4")
    narrow, own = (
        weight_bytes(each, settings())[0] for each in (of, of._replace(parts={"attention": ("fp8", None, 1.0)}))
    )
    assert own - narrow == pytest.approx(36 * 2 * 4096 * (4096 + 1024) * (1.0 - 0.5625))


def test_a_head_may_have_a_format_of_its_own() -> None:
    of = serving(DENSE)
    own, stages = of._replace(parts={"head": ("bf16", 0.5625, 0.5625)}), settings(pipeline=[1.0, 2.0])
    saved = (weight_bytes(of, stages) - weight_bytes(own, stages)).tolist()
    assert saved == [pytest.approx(151936 * 4096 * (2.0 - 0.5625)), 0.0]  # a stage with an embedding has no head
    times = [iteration_costs(each, settings(), costs()).sampled[0, 0] for each in (of, own)]
    assert times[1] < 0.5 * times[0]


def test_narrow_weights_leave_tables_in_16_bits() -> None:
    tables = 2 * 2 * 151936 * 4096
    wide, narrow = (weight_bytes(serving(precision=name), settings())[0] for name in ("bf16", "fp8"))
    assert narrow - tables == pytest.approx(0.5 * (wide - tables))
    head = weight_bytes(serving(precision="fp8")._replace(head_bytes=0.6), settings())[0]  # and no embedding: llama.cpp
    assert narrow - head == pytest.approx(tables - 0.6 * tables / 4)


def test_a_cached_token_holds_keys_and_values_of_all_layers() -> None:
    assert token_bytes(DENSE, settings())[0] == 36 * 2 * 8 * 128 * 2
    found = token_bytes(DENSE, settings(tensor=[8.0, 16.0], cache_element_bytes=1.0))
    assert found.tolist() == [36 * 2 * 128, 36 * 2 * 128]


def test_a_latent_is_whole_on_each_tensor_rank_that_does_not_share_it() -> None:
    found = token_bytes(LATENT, settings(tensor=[1.0, 8.0, 8.0], sharing=[1.0, 1.0, 8.0]))
    assert found.tolist() == [36 * 576 * 2, 36 * 576 * 2, 36 * 72 * 2]


def test_a_layer_with_a_window_caches_only_its_window_if_the_engine_frees_the_rest() -> None:
    model = mixed(DENSE, {"window": 1024}, 30)
    of = serving(model, frees_windows=True)._replace(tokens=4096.0)
    assert memory(of).token[0] == pytest.approx((6 + 30 / 4) * 2 * 8 * 128 * 2)
    assert token_bytes(model, settings(), 4096.0, 2048.0)[0] == pytest.approx((6 + 30 * 3 / 4) * 2 * 8 * 128 * 2)
    assert memory(serving(model)._replace(tokens=4096.0)).token[0] == token_bytes(DENSE, settings())[0]


@pytest.mark.parametrize(("tokens", "filled"), [(4096.0, 1.0), (1280.0, 1.0), (512.0, 1.25)])
def test_windows_with_a_part_of_the_cache_have_room_for_a_share_of_the_tokens(tokens: float, filled: float) -> None:
    """sglang 0.5.23 `pool_configurator.py`: a token has 6 layers and 0.8 of 30, which short sequences fill first."""
    model = mixed(DENSE, {"window": 1024}, 30)
    found = token_bytes(model, settings(window_share=0.8), tokens, frees_windows=False)
    assert found[0] == pytest.approx(filled * (6 + 30 * 0.8) * 2 * 8 * 128 * 2)


@pytest.mark.parametrize(("prompt", "piece"), [(1000.0, 1000.0), (5000.0, 1024.0)])
def test_windows_with_a_part_of_the_cache_may_limit_the_sequences(prompt: float, piece: float) -> None:
    """sglang 0.5.15 `swa_radix_cache.py`: a running request locks the windows of its last piece of a prompt."""
    sizes = {"max_batched_tokens": 2048, "window_share": 0.1, "request_bytes": 2.0**30}
    free, found = (memory(serving()._replace(prompt=prompt), window_kept=each, **sizes) for each in (0.0, 256.0))
    assert found.cache_tokens[0] == free.cache_tokens[0] < memory(serving()).cache_tokens[0]
    assert free.sequences[0] == inf
    assert found.sequences[0] == found.cache_tokens[0] * 0.1 // (piece + 256)


def test_layers_that_reuse_keys_and_values_may_have_a_cache_of_their_own() -> None:
    """sglang 0.5.15 `pool_configurator.py`: all layers have buffers; Gemma 4 E4B reuses 18 of 42."""
    model = public_model("google/gemma-4-E4B-it")
    few, all_layers = (token_bytes(model, settings(), caches_reused=each)[0] for each in (False, True))
    assert few == 2 * 2 * 2 * (20 * 256 + 4 * 512)
    assert all_layers == 2 * 2 * 2 * (35 * 256 + 7 * 512)


def test_attention_ranks_may_divide_the_head_and_dense_networks() -> None:
    """sglang 0.5.15 `models/qwen3_moe.py`: the head, unless enable-dp-lm-head is set; `layers/communicator.py`."""
    whole, head, networks = (
        weight_bytes(serving(DENSE), settings(data=4.0, **each))[0]
        for each in ({}, {"head_ranks": 4.0}, {"network_ranks": 4.0})
    )
    assert whole - head == 0.75 * 2.0 * DENSE.vocab_size * DENSE.hidden_size
    assert whole - networks == 0.75 * 2.0 * DENSE.num_layers * 3 * DENSE.hidden_size * DENSE.ffn_hidden_size


def test_kernels_that_compute_what_windows_mask_take_prompts_longer() -> None:
    """Triton's for prompts in SGLang 0.5.14, table of aiconfigurator-core 0.12.0: 8,192 tokens of 16 heads of 256
    elements with a window of 1,024 take 5.37 ms on an H200, 102 TFLOPS of all pairs."""
    of = serving(mixed(DENSE, {"window": 1024}, 30))._replace(prompt=8192.0, peak=989e12)
    usual, masks = (iteration_costs(of, settings(masked_rate=each), costs()).pair[0] for each in (np.nan, 0.1))
    heads, width = DENSE.num_attention_heads, DENSE.kv_channels or 0
    assert masks == pytest.approx(36 * 4.0 * heads * width / (0.1 * 989e12))
    assert masks > usual


def test_layers_that_run_again_have_a_cache_and_no_weights() -> None:
    layers = mixed(DENSE, {"window": 1024}, 30).layers
    model = replace(DENSE, num_layers=72, layers=(*layers, *(replace(each, repeats=True) for each in layers)))
    assert weight_bytes(serving(model), settings())[0] == weight_bytes(serving(DENSE), settings())[0]
    assert parameters(model) == parameters(DENSE)
    assert token_bytes(model, settings())[0] == 2 * token_bytes(DENSE, settings())[0]


def test_residual_streams_take_time_and_memory() -> None:
    model = replace(DENSE, residual_streams=4, residual_weights=1000)
    assert weight_bytes(serving(model), settings())[0] - weight_bytes(serving(DENSE), settings())[0] == 72 * 2000
    assert (times(model).local > times(DENSE).local).all()


def test_an_index_has_a_cache_and_weights_of_its_own() -> None:
    model = mixed(LATENT, INDEXED, 36)
    assert token_bytes(model, settings(tensor=8.0))[0] == 36 * (576 * 2 + 132)
    rank, hidden = LATENT.q_lora_rank or LATENT.hidden_size, LATENT.hidden_size
    half = replace(model, layers=mixed(LATENT, {"indexer": SCORES}, 18).layers[:18] + model.layers[18:])
    assert token_bytes(half, settings())[0] == 36 * 576 * 2 + 18 * 132
    assert token_bytes(half, settings(), indexes_all=True)[0] == token_bytes(model, settings())[0]
    added = weight_bytes(serving(model), settings())[0] - weight_bytes(serving(LATENT), settings())[0]
    assert added == pytest.approx(36 * (rank * 32 * 128 + hidden * 160) * 2)


def test_a_state_of_linear_attention_is_divided_by_the_tokens_of_its_sequence() -> None:
    model = mixed(DENSE, STATES, 27)
    state = 27 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 + 32) * 128)
    short, long = (token_bytes(model, settings(), tokens)[0] for tokens in (1e2, 1e4))
    assert short - long == pytest.approx(state / 1e2 - state / 1e4)
    assert long - state / 1e4 == pytest.approx(9 * 2 * 8 * 128 * 2)
    assert token_bytes(model, settings(tensor=8.0), 1e2)[0] == pytest.approx(short / 8)


def test_the_cache_takes_the_remaining_memory() -> None:
    found = memory(serving())
    rest = 72e9 - found.weights - found.activations - found.graphs
    assert found.cache_tokens == pytest.approx(rest / (36 * 2 * 8 * 128 * 2))
    assert memory(serving(), max_batched_tokens=65536).cache[0] < found.cache[0]
    assert memory(serving(), graph_tokens=0).cache[0] > found.cache[0]
    assert memory(serving(), cache_bytes=4.0 * GIB).cache[0] == 4 * GIB


def test_the_cache_may_be_a_share_of_what_is_free_before_weights_are_loaded_or_of_what_all_else_leaves() -> None:
    found, held = memory(serving(activations_beside=True)), costs().memory  # SGLang's `_profile_available_bytes`
    free = held.capacity_bytes() - held.device_used_bytes(np.zeros(1))
    assert found.cache == pytest.approx(72e9 / held.capacity_bytes() * free - found.weights)
    found = memory(serving(), rest_share=0.9)
    rest = held.capacity_bytes() - held.device_used_bytes(found.weights + found.activations + found.graphs)
    assert found.cache == pytest.approx(0.9 * rest, rel=1e-3)


@pytest.mark.parametrize(("pads", "gib"), [([1, 64, 2], 64.38), ([256, 128, 1], 65.97), ([1, 64, 1], 60.95)])
def test_experts_in_mxfp4_may_have_padded_rows_and_two_copies_of_scales(pads: list[int], gib: float) -> None:
    """vLLM prints 64.38 GiB for gpt-oss-120b with Triton on H100, 65.97 with Marlin (its issues 33155 and 23278).
    With one copy, 60.95: 114.7e9 weights of 17/32 bytes, scales padded by 4%, 2.1e9 others, fp32 biases."""
    stored = serving(public_model("openai/gpt-oss-120b"), pads_mxfp4={"other": pads})
    stored = stored._replace(weight_bytes=17 / 32, wide=frozenset({"attention"}))
    assert weight_bytes(stored, settings())[0] / GIB == pytest.approx(gib, rel=0.01)
    one, eight = (expert_bytes(stored, settings(tensor=[each]))[0] for each in (1, 8))
    assert eight * 8 / one == pytest.approx(384 * 8 / (-(-2880 // pads[1]) * pads[1]))  # 360 columns, to 384


@pytest.mark.parametrize(("weight_bytes_each", "copied_below", "copies"), [(1.0, 2.0, 1), (2.0, 2.0, 0), (2.0, inf, 1)])
def test_the_product_that_latent_attention_absorbs_may_have_a_copy(
    weight_bytes_each: float, copied_below: float, copies: int
) -> None:
    model = public_model("deepseek-ai/DeepSeek-V3")
    none, some = (
        weight_bytes(serving(model, copied_below=each)._replace(weight_bytes=weight_bytes_each), settings())[0]
        for each in (0.0, copied_below)
    )
    assert some - none == copies * 2.0 * 61 * 128 * (128 + 128) * 512


def test_attention_ranks_have_separate_caches() -> None:
    one, two = memory(serving(EXPERTS), data=[1.0, 2.0], budget=300e9).cache_tokens
    assert two > 2 * one


def test_graphs_and_communicators_follow_from_the_settings() -> None:
    assert settings(max_running=[512, 4]).captured(2.0).tolist() == [512.0, 8.0]
    assert settings(max_running=[12, 3]).captured(1.0).tolist() == [8.0, 3.0]
    drafting = settings(max_running=[2, 512], drafted=[4, 4])  # an iteration of vLLM has five tokens of each sequence
    assert drafting.captured(2.0).tolist() == [16.0, 512.0]
    assert settings(tensor=[1, 2, 2], data=[1, 1, 2]).communicators.tolist() == [0.0, 2.0, 3.0]
