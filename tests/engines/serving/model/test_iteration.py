"""Seconds of iterations: what more tokens, devices, narrower weights and missing graphs do."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.chip import with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.model import Indexer, LinearAttention, Model, Windows
from flagcore.engines.serving.model.iteration import NODES, distinct_experts, interpolate, iteration_costs
from flagcore.engines.serving.model.simulation import Lane, Price
from flagcore.engines.serving.model.work import Serving
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.roofline import Roofline
from tests.served import CHIP, DENSE, EXPERTS, LATENT, OVER, costs, settings, times


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=lambda model: model.name)
def test_more_tokens_never_take_less(model: object) -> None:
    found = times(model, tensor=[1.0, 2.0, 4.0])
    for table in (found.local, found.shared, found.sampled):
        assert (np.diff(table, axis=1) >= -1e-12).all()


def test_decoding_one_sequence_reads_the_weights_once() -> None:
    found = times(overheads=replace(OVER, attention=0.0, ffn=0.0))
    read = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288) * 2 / 3e12
    assert read < found.local[0, 0] < 1.35 * read


def test_narrower_weights_are_read_faster_and_tensor_ranks_share_them() -> None:
    assert times(precision="fp8").local[0, 0] < 0.7 * times().local[0, 0]
    local = times(tensor=[1.0, 2.0, 4.0, 8.0]).local[:, 0]
    assert (np.diff(local) < 0).all()


def test_key_and_value_heads_are_repeated_beyond_their_number() -> None:
    cached = times(tensor=[4.0, 8.0, 16.0]).cached
    assert cached[1] == pytest.approx(0.5 * cached[0])
    assert cached[2] > 0.9 * cached[1]


def test_each_tensor_rank_reads_a_latent_which_is_smaller_than_its_heads() -> None:
    found = times(LATENT, tensor=[1.0, 8.0]).cached
    heads = times(replace(DENSE, num_query_groups=32)).cached[0]
    assert found[1] > 0.8 * found[0]
    assert found[0] < 0.2 * heads


def test_layers_with_windows_read_and_compare_less() -> None:
    windowed = replace(DENSE, windows=Windows(num_layers=36, tokens=1024))
    of = Serving(model=windowed, precision="bf16", overheads=OVER, tokens=4096.0, prompt=2048.0)
    found, plain = iteration_costs(of, settings(), costs()), times()
    assert found.cached[0] == pytest.approx(plain.cached[0] / 4)
    assert found.pair[0] == pytest.approx(plain.pair[0] * 3 / 4)
    assert (found.local == plain.local).all()


def test_sparse_attention_is_cheaper_for_long_requests_only() -> None:
    model = replace(LATENT, indexer=Indexer(heads=32, head_dim=128, top_k=2048))
    for tokens, is_cheaper in ((1024.0, False), (65536.0, True)):
        of = Serving(model=model, precision="bf16", overheads=OVER, tokens=tokens, prompt=tokens)
        found, plain = iteration_costs(of, settings(), costs()), times(LATENT)
        assert (found.cached[0] < plain.cached[0]) == is_cheaper
        assert (found.pair[0] < plain.pair[0]) == is_cheaper


def test_linear_attention_takes_time_per_token_but_not_per_pair() -> None:
    layers = LinearAttention(num_layers=27, key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    of = Serving(model=replace(DENSE, linear_attention=layers), precision="bf16", overheads=OVER, tokens=1e4)
    found, plain = iteration_costs(of, settings(), costs()), times()
    assert found.pair[0] == pytest.approx(plain.pair[0] / 4)
    states = 27 * 2 * layers.state_bytes / 1e4 / 3e12
    assert found.cached[0] == pytest.approx(plain.cached[0] / 4 + states, rel=0.1)
    assert found.local[0, -1] > 0.8 * plain.local[0, -1]


def test_a_smaller_cache_type_is_read_faster() -> None:
    assert times(cache_element_bytes=[2.0, 1.0]).cached[1] == pytest.approx(0.5 * times().cached[0])


def test_few_tokens_use_few_experts_and_many_use_all() -> None:
    assert distinct_experts(128.0, 8.0, np.array([1.0, 2.0, 1e4])) == pytest.approx([8.0, 15.5, 128.0])
    shared = times(EXPERTS).shared[0]
    assert shared[0] < 0.5 * shared[NODES.tolist().index(128)]


def test_attention_ranks_exchange_tokens_with_experts() -> None:
    found = times(EXPERTS, tensor=[2.0, 1.0], data=[1.0, 2.0], expert=[2.0, 2.0])
    assert found.shared[1, -1] > found.shared[0, -1]


def test_kernels_behind_an_exchange_have_their_own_rate() -> None:
    half = replace(OVER, exchanged_share=0.5)
    arguments = {"tensor": [2.0, 1.0], "data": [1.0, 2.0], "expert": [2.0, 2.0]}
    usual, slower = (times(EXPERTS, overheads=overheads, **arguments) for overheads in (OVER, half))
    assert slower.shared[0] == pytest.approx(usual.shared[0])
    work, slower_work = ((found.shared - found.exchanged)[1, -1] for found in (usual, slower))
    assert 1.5 * work < slower_work < 2.0 * work


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


def test_a_large_pass_is_settings() -> None:
    found = times(pass_tokens=[1e9, 512.0]).local
    last = NODES.tolist().index(2048)
    assert found[1, last] == pytest.approx(4 * found[1, NODES.tolist().index(512)])
    assert found[1, last] > found[0, last]


def test_work_is_shared_among_cores() -> None:
    one, four = times(devices=[1, 4]).local[:, 0]
    assert one == pytest.approx(4 * four)


def test_a_pipeline_adds_messages() -> None:
    one, two = times(pipeline=[1.0, 2.0]).local[:, 10]
    assert two > one
    none, first, second = times(pipeline=[1.0, 2.0, 3.0]).messages[:, 10]
    assert (none, second) == (0.0, pytest.approx(2 * first))


def test_tables_are_interpolated_and_zero_work_takes_no_time() -> None:
    table = times().local
    result = interpolate(np.repeat(table, 3, axis=0), np.array([0.0, 64.0, 80.0]))
    low, high = table[0, NODES.tolist().index(64)], table[0, NODES.tolist().index(96)]
    assert result == pytest.approx([0.0, low, 0.5 * (low + high)])


def test_weights_that_are_only_stored_narrower_are_computed_in_the_wider_format() -> None:
    wide = iteration_costs(Serving(model=DENSE, precision="bf16", overheads=OVER), settings(), costs()).local[0]
    stored = Serving(model=DENSE, precision="bf16", overheads=OVER, weight_bytes=0.5)
    narrow = iteration_costs(stored, settings(), costs()).local[0]
    assert narrow[0] < 0.5 * wide[0]
    assert narrow[-1] > 0.9 * wide[-1]


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=lambda model: model.name)
def test_a_chip_without_bf16_serves_in_fp16(model: Model) -> None:
    rate = CHIP.dense_flops_per_second["bf16"]
    older = replace(costs(), kernels=Roofline(chip=replace(CHIP, dense_flops_per_second={"fp16": rate})))
    found = iteration_costs(Serving(model=model, precision="fp16", overheads=OVER), settings(), older)
    assert found.local == pytest.approx(times(model).local)
    assert found.cached == pytest.approx(times(model).cached)


HOSTS = NodeGroup(chip=with_network(CHIP, 50e9), nodes=8, devices_per_node=8)
NETWORK = replace(costs(), collectives=Collectives(topology=topology_of(HOSTS)))
"""Costs on eight hosts."""


def seconds_of_experts(tokens: float, **arguments: float | bool) -> float:
    """What the experts of 64 attention ranks on eight hosts take for the tokens of all ranks."""
    layout = settings(data=64.0, expert=64.0, **arguments)
    found = iteration_costs(Serving(model=EXPERTS, precision="fp8", overheads=OVER), layout, NETWORK)
    return float(interpolate(found.shared, np.array([tokens]))[0])


def test_sending_tokens_to_their_experts_is_faster_than_gathering_all() -> None:
    assert seconds_of_experts(16384, exchanges=True, balanced=True) < 0.5 * seconds_of_experts(16384)


def test_copies_of_busy_experts_shorten_an_iteration() -> None:
    balanced, skewed = (seconds_of_experts(16384, exchanges=True, balanced=each) for each in (True, False))
    assert balanced < 0.8 * skewed


def test_overlapping_the_exchange_helps_large_batches_but_hides_at_most_the_shorter_part() -> None:
    layout = {"data": 64.0, "expert": 64.0, "exchanges": True, "balanced": True}
    plain, found = (
        iteration_costs(
            Serving(model=EXPERTS, precision="fp8", overheads=OVER), settings(**layout, overlaps=each), NETWORK
        )
        for each in (False, True)
    )
    tokens = np.array([65536.0])
    whole, hidden = (
        interpolate(each.local, tokens / 64)[0] + interpolate(each.shared, tokens)[0] for each in (plain, found)
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
