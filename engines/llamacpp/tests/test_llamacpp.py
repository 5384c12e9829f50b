from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from flagcore_llamacpp.engine import ENGINE as ENGINE
from flagcore_serving.job import Load
from flagcore_serving.space.hardware import Hardware

from engines.serving.tests.engines.tasks import LOAD, broken, figures, merged, server, serving, settings, space_of
from flagcore.errors import SpecError
from tests.product.tasks import DENSE


def cores(**arguments: Any) -> Any:
    return serving("llamacpp", on_cores=True, devices=2, weights="model.gguf", **arguments)


def after(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_context_grows_with_the_slots_to_hold_the_longest_requests() -> None:
    assert after(server(cores(), parallel=8).argv, "--ctx-size") == str(8 * 256)
    longer = cores(loads=(Load(input_len=300, output_len=100, prefix_len=50),))
    assert after(server(longer, parallel=8).argv, "--ctx-size") == str(8 * 512)


def test_a_space_may_use_yaml_words() -> None:
    space = {"flash_attention": (True, False), "n_gpu_layers": ("auto", "all", 0), "instance": (1, 2)}
    choices = space_of(ENGINE, serving("llamacpp", space=space)).choices
    assert set(choices["flash_attention"]) == {None, "on", "off"}
    assert set(choices["n_gpu_layers"]) == {-1, 0, 9999}
    assert choices["instances"] == (1, 2)


def test_instances_have_disjoint_cores() -> None:
    servers = [server(cores(), index, instances=2) for index in (0, 1)]
    assert after(servers[0].argv, "--threads") == "1"
    assert int(servers[0].environment["GOMP_SPINCOUNT"]) > 0
    places = [Hardware.of(cores()).cores(first, 1) for first in (0, 1)]
    assert [len(place) for place in places] == [1, 1]
    assert places[0] != places[1]
    assert Hardware.of(serving("llamacpp")).cores(0, 1) == ()


def test_a_misspelt_flag_is_found_before_launch_with_a_server_wheel() -> None:
    with pytest.raises(SpecError, match="did you mean cache-reuse"):
        ENGINE.axes(cores(engine_args={"cache_resue": 1}))
    assert server(cores(engine_args={"new_flag": 1}, command=("/bin/echo",))).argv[-2:] == ("--new-flag", "1")


def test_other_flags_reach_the_server_in_its_spelling() -> None:
    arguments = {"nkvo": True, "mg": 1, "cont_batching": False, "fit": False, "warmup": True, "cache-ram": 64}
    words = server(cores(engine_args=arguments)).argv
    spelt = ["--no-kv-offload", "--main-gpu", "1", "--no-cont-batching", "--fit", "off", "--warmup"]
    assert [*words[-len(spelt) - 2 :]] == [*spelt, "--cache-ram", "64"]
    assert ("--cache-ram", "0") not in pairwise(words)


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("no-kv-offload", "--kv-offload"),
        ("kv-offload", "--no-kv-offload"),
        ("no-cont-batching", "--cont-batching"),
        ("no-mmap", "--mmap"),
        ("mmap", "--no-mmap"),
    ],
)
def test_false_is_the_opposite_flag(flag: str, word: str) -> None:
    assert server(cores(engine_args={flag: False}, command=("/bin/echo",))).argv[-1] == word


def test_the_host_keeps_prompts_that_are_shared() -> None:
    def kept(turns: int, **arguments: int) -> tuple[bool, float]:
        task = cores(loads=(replace(LOAD, turns=turns, num_prompts=64, concurrency=8),), engine_args=arguments)
        hit_rate = figures(task, parallel=2).get("cache_hit_rate", 0.0)
        return ("--cache-ram", "0") not in pairwise(server(task, parallel=2).argv), hit_rate

    assert kept(1) == (False, 0.0)
    is_kept, rate = kept(4)
    assert is_kept
    assert rate == kept(4, **{"cache-ram": 4096})[1] == kept(4, **{"cache-ram": -1})[1] > 0.3
    assert kept(4, **{"cache-ram": 0})[1] < 0.1


def test_only_candidates_with_speculation_have_its_flags() -> None:
    task = cores(
        engine_args={"spec-draft-model": "draft.gguf", "spec-draft-n-max": 3},
        space={"speculation": (None, "ngram-simple", "draft-simple")},
    )
    assert not broken(ENGINE, task, speculation="draft-simple")
    assert merged(ENGINE, cores(), speculation="none")["speculation"] == 0
    words = server(task, speculation="draft-simple").argv
    assert (after(words, "--spec-type"), after(words, "--spec-draft-model")) == ("draft-simple", "draft.gguf")
    assert not [word for word in server(task).argv if word.startswith("--spec")]


def test_the_cache_has_the_elements_of_all_slots() -> None:
    task = cores()
    elements = 8 * 256 * DENSE.num_layers * 2 * DENSE.num_query_groups * DENSE.kv_channels
    assert settings(task, parallel=8, kv_cache_type="q8_0").cache_bytes.item() == pytest.approx(elements * 34 / 32 / 2)


def test_the_default_uses_the_cards_that_the_weights_need() -> None:
    assert ENGINE.defaults(serving("llamacpp", memory=10**6))["pipeline_model_parallel_size"] == 1
    large = replace(DENSE, num_layers=64, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64)
    assert ENGINE.defaults(serving("llamacpp", model=large, devices=8))["pipeline_model_parallel_size"] == 2
