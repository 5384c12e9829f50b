from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from flagcore_llamacpp.engine import ENGINE as ENGINE
from flagcore_serving.job import Load
from flagcore_serving.space.hardware import Hardware

from engines.serving.tests.engines.tasks import LOAD, broken, figures, merged, row, server, serving, settings, space_of
from flagcore.errors import SpecError
from tests.product import serving_inputs
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
    def kept(turns: int, flight: int = 8, model: Any = DENSE, **arguments: int) -> tuple[bool, float]:
        load = replace(LOAD, turns=turns, num_prompts=64, concurrency=flight)
        task = cores(loads=(load,), engine_args=arguments, model=model)
        hit_rate = figures(task, parallel=2).get("cache_hit_rate", 0.0)
        return ("--cache-ram", "0") not in pairwise(server(task, parallel=2).argv), hit_rate

    assert kept(1) == (False, 0.0)
    is_kept, rate = kept(4)
    assert is_kept
    assert rate == kept(4, **{"cache-ram": 4096})[1] == kept(4, **{"cache-ram": -1})[1] > 0.3
    assert kept(4, **{"cache-ram": 0})[1] < 0.1
    large = replace(DENSE, num_layers=400)
    some, none = (kept(4, flight=3, model=large, **{"cache-ram": size})[1] for size in (1, 0))
    assert some > none, "room for 20 tokens keeps one prompt"


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


def test_experts_of_the_first_layers_stay_on_the_host() -> None:
    """Each layer on the host frees the weights of its experts and takes time; the first, dense layers have none."""
    sparse = replace(serving_inputs.EXPERTS, moe_first_dense_layers=2)
    task = serving("llamacpp", model=sparse, devices=1, memory=10**12, loads=(replace(LOAD, concurrency=1),))

    def found(**values: int) -> Any:
        return ENGINE.predict(task, row(ENGINE, task, parallel=1, **values), serving_inputs.costs()).row(0)

    def static(**values: int) -> float:
        return found(**values).static_bytes

    layer_bytes = 3.0 * sparse.hidden_size * 768 * 128 * 2.0
    first, dense, some, most = (found(n_cpu_moe=layers) for layers in (0, 2, 10, 36))
    assert first == dense
    freed = [first.static_bytes - each.static_bytes for each in (some, most)]
    assert freed == pytest.approx([8 * layer_bytes, 34 * layer_bytes])
    assert first.step_time_s < some.step_time_s < most.step_time_s
    assert some.high_s / some.low_s > first.high_s / first.low_s, "the rate of the host's memory is assumed"
    on_host_anyway = static(n_gpu_layers=31) - static(n_gpu_layers=31, n_cpu_moe=10)
    assert on_host_anyway == pytest.approx(4 * layer_bytes)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({"n-cpu-moe": 4}, 4, ("--n-cpu-moe", "4")),
        ({"ncmoe": 99}, 9999, ("--cpu-moe", "--batch-size")),
        ({"cpu-moe": True}, 9999, ("--cpu-moe", "--batch-size")),
    ],
)
def test_how_experts_on_the_host_are_set(arguments: Any, code: int, words: tuple[str, str]) -> None:
    task = serving("llamacpp", model=serving_inputs.EXPERTS, engine_args=arguments, command=("/bin/echo",))
    value = ENGINE.axes(task)
    chosen = next(axis for axis in value if axis.knob == "n_cpu_moe").values[0]
    assert merged(ENGINE, task, n_cpu_moe=chosen)["n_cpu_moe"] == code
    on_cores = serving("llamacpp", on_cores=True, model=serving_inputs.EXPERTS)
    assert merged(ENGINE, on_cores, n_cpu_moe=chosen)["n_cpu_moe"] == 0, "cores compute all experts"
    assert words[0] in server(task, n_cpu_moe=code).argv
    assert broken(ENGINE, serving("llamacpp"), n_cpu_moe=chosen) == ["host_experts"]
