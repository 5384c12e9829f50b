"""Memory of a server: weights, what a token takes, and what is left for the cache."""

from dataclasses import replace

import numpy as np
import pytest
from flagcore_serving.model.memory import ServingMemory, serving_memory, token_bytes, weight_bytes
from flagcore_serving.model.work import Serving

from flagcore.domain.model import Indexer, LinearAttention, Windows
from tests.product.serving_inputs import DENSE, EXPERTS, LATENT, OVER, costs, settings

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


def test_weights_are_split_over_tensor_ranks_and_stages() -> None:
    found = weight_bytes(serving(), settings(tensor=[1.0, 2.0, 1.0], pipeline=[1.0, 1.0, 2.0]))
    assert found[1] == pytest.approx(0.5 * found[0])
    assert 0.5 * found[0] <= found[2] < 0.6 * found[0]


def test_experts_are_split_over_attention_ranks_too() -> None:
    one, four = weight_bytes(serving(EXPERTS), settings(data=[1.0, 4.0]))
    experts = 36 * 3 * 4096 * 768 * 128 * 2
    assert one - four == pytest.approx(0.75 * experts)


def test_narrow_weights_leave_tables_in_16_bits() -> None:
    tables = 2 * 2 * 151936 * 4096
    wide, narrow = (weight_bytes(serving(precision=name), settings())[0] for name in ("bf16", "fp8"))
    assert narrow - tables == pytest.approx(0.5 * (wide - tables))


def test_a_cached_token_holds_keys_and_values_of_all_layers() -> None:
    assert token_bytes(DENSE, settings())[0] == 36 * 2 * 8 * 128 * 2
    found = token_bytes(DENSE, settings(tensor=[8.0, 16.0], cache_element_bytes=1.0))
    assert found.tolist() == [36 * 2 * 128, 36 * 2 * 128]


def test_a_latent_is_whole_on_each_tensor_rank_that_does_not_share_it() -> None:
    found = token_bytes(LATENT, settings(tensor=[1.0, 8.0, 8.0], sharing=[1.0, 1.0, 8.0]))
    assert found.tolist() == [36 * 576 * 2, 36 * 576 * 2, 36 * 72 * 2]


def test_a_layer_with_a_window_caches_only_its_window_if_the_engine_frees_the_rest() -> None:
    model = replace(DENSE, windows=Windows(num_layers=30, tokens=1024))
    of = replace(serving(model, frees_windows=True), tokens=4096.0)
    assert memory(of).token[0] == pytest.approx((6 + 30 / 4) * 2 * 8 * 128 * 2)
    assert token_bytes(model, settings(), 4096.0, 2048.0)[0] == pytest.approx((6 + 30 * 3 / 4) * 2 * 8 * 128 * 2)
    assert memory(replace(serving(model), tokens=4096.0)).token[0] == token_bytes(DENSE, settings())[0]


def test_an_index_has_a_cache_and_weights_of_its_own() -> None:
    model = replace(LATENT, indexer=Indexer(heads=32, head_dim=128, top_k=2048))
    assert token_bytes(model, settings(tensor=8.0))[0] == 36 * (576 * 2 + 132)
    rank, hidden = LATENT.q_lora_rank or LATENT.hidden_size, LATENT.hidden_size
    added = weight_bytes(serving(model), settings())[0] - weight_bytes(serving(LATENT), settings())[0]
    assert added == pytest.approx(36 * (rank * 32 * 128 + hidden * 160) * 2)


def test_a_state_of_linear_attention_is_divided_by_the_tokens_of_its_sequence() -> None:
    layers = LinearAttention(num_layers=27, key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    model = replace(DENSE, linear_attention=layers)
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


def test_an_engine_may_count_activations_outside_its_share() -> None:
    found = memory(serving(activations_beside=True))
    assert found.cache == pytest.approx(72e9 - found.weights)


def test_a_cache_size_that_is_set_is_used() -> None:
    found = memory(serving(), cache_bytes=4.0 * GIB)
    assert found.cache[0] == 4 * GIB


def test_attention_ranks_have_separate_caches() -> None:
    one, two = memory(serving(EXPERTS), data=[1.0, 2.0], budget=300e9).cache_tokens
    assert two > 2 * one


def test_graphs_and_communicators_follow_from_the_settings() -> None:
    assert settings(max_running=[512, 4]).captured.tolist() == [512.0, 8.0]
    assert settings(tensor=[1, 2, 2], data=[1, 1, 2]).communicators.tolist() == [0.0, 2.0, 3.0]
