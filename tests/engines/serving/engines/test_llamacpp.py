from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.launch.server import PORT
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as ENGINE
from flagcore.engines.serving.space.hardware import Hardware
from flagcore.engines.serving.space.placement import placements
from flagcore.errors import NoDevice, SpecError
from tests.engines.serving.engines.tasks import LOAD, broken, merged, row, serving, space_of
from tests.served import costs
from tests.small import DENSE

PROPS = '{"total_slots": 4, "default_generation_settings": {"n_ctx": 512}}'
LOG = """
0.00.002.125 I cmn  common_param: system_info: n_threads = 2 (n_threads_batch = 1) / 2 | CPU : SSE3 = 1 |
0.00.051.259 I llama_context: n_batch               = 2048
0.00.051.272 I llama_context: n_ubatch              = 256
0.00.051.299 I llama_context: flash_attn            = enabled
0.00.055.055 I llama_kv_cache: size =    6.38 MiB (   512 cells), K (q8_0):    3.19 MiB, V (q8_0):    3.19 MiB
0.00.073.107 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 512, kv_unified = 'false'
0.00.091.259 I llama_context: n_batch               = 64
"""


def cores(**arguments: Any) -> Any:
    return serving("llamacpp", on_cores=True, devices=2, weights="model.gguf", **arguments)


def argv(task: Any, index: int = 0, **values: Any) -> tuple[str, ...]:
    return started(task, index, **values).argv


def started(task: Any, index: int = 0, **values: Any) -> Any:
    placement = placements(task, {**ENGINE.defaults(task), **values})[index]
    return ENGINE.server(task, placement.values, Hardware.of(task).cores(placement.first, placement.width))


def after(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_unset_arguments_have_llama_cpps_defaults() -> None:
    words = argv(cores())
    assert "--parallel" not in words
    assert "--threads" not in words
    assert "--ctx-size" not in words
    assert after(words, "--port") == PORT


def test_the_context_grows_with_the_slots_to_hold_the_longest_requests() -> None:
    assert after(argv(cores(), parallel=8), "--ctx-size") == str(8 * 256)
    longer = cores(loads=(Load(input_len=300, output_len=100, prefix_len=50),))
    assert after(argv(longer, parallel=8), "--ctx-size") == str(8 * 512)


def test_a_context_set_by_the_user_is_kept_and_too_many_slots_for_it_are_illegal() -> None:
    task = cores(engine_args={"ctx_size": 1024})
    assert after(argv(task, parallel=4), "--ctx-size") == "1024"
    assert "slot_context" not in broken(ENGINE, task, parallel=4)
    assert "slot_context" in broken(ENGINE, task, parallel=8)
    assert "slot_context" not in broken(ENGINE, task, parallel=8, kv_unified="on")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("threads_on_cores", {"threads": 2, "instances": 2}),
        ("threads_on_cores", {"threads_batch": 3}),
        ("cards", {"instances": 3}),
        ("cores_are_not_split", {"tensor_model_parallel_size": 2}),
        ("most_slots", {"parallel": 257}),
        ("batch_holds_slots", {"parallel": 64, "batch_size": 32}),
        ("batch_holds_slots", {"batch_size": 2}),
        ("ubatch_in_batch", {"ubatch_size": 1024, "batch_size": 512}),
        ("ubatch_in_batch", {"ubatch_size": 4096}),
        ("quantized_cache", {"kv_cache_type": "q8_0", "flash_attention": "off"}),
        ("context_length", {"context_len": 128}),
        ("context_grain", {"context_len": 1000}),
        ("speculation_needs_a_draft", {"speculation": "draft-simple"}),
        ("no_prediction_layers", {"speculation": "draft-mtp"}),
    ],
)
def test_settings_that_llama_cpp_refuses_are_illegal(rule: str, values: dict[str, Any]) -> None:
    assert rule in broken(ENGINE, cores(), **values)


def test_the_defaults_are_legal() -> None:
    assert broken(ENGINE, cores()) == []
    assert broken(ENGINE, serving("llamacpp", weights="model.gguf")) == []


@pytest.mark.parametrize(
    ("mode", "split", "legal"),
    [
        ("row", {"tensor_model_parallel_size": 2}, True),
        ("tensor", {"tensor_model_parallel_size": 2}, True),
        ("layer", {"pipeline_model_parallel_size": 2}, True),
        (None, {"pipeline_model_parallel_size": 2}, True),
        ("none", {}, True),
        ("row", {}, False),
        ("layer", {"tensor_model_parallel_size": 2}, False),
        ("none", {"pipeline_model_parallel_size": 2}, False),
        (None, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, False),
    ],
)
def test_a_split_mode_goes_with_the_devices_of_an_instance(
    mode: str | None, split: dict[str, int], legal: bool
) -> None:
    task = serving("llamacpp", weights="model.gguf")
    assert (broken(ENGINE, task, split_mode=mode, **split) == []) is legal


def test_llama_cpps_default_values_are_merged_with_not_set() -> None:
    task = cores()
    own = merged(ENGINE, task)
    assert merged(ENGINE, task, batch_size=2048, ubatch_size=512, kv_cache_type="f16", flash_attention="auto") == own
    assert merged(ENGINE, task, n_gpu_layers=99) == own
    assert merged(ENGINE, task, batch_size=256, ubatch_size=256) == merged(ENGINE, task, batch_size=256)
    assert merged(ENGINE, task, threads=1, threads_batch=1) == merged(ENGINE, task, threads=1)
    assert merged(ENGINE, task, ubatch_size=256) != own
    assert merged(ENGINE, task, split_mode="none") == own
    for wide, mode in (("tensor", "row"), ("pipeline", "layer")):
        split = {f"{wide}_model_parallel_size": 2}
        assert merged(ENGINE, task, split_mode=mode, **split) == merged(ENGINE, task, **split)


def test_a_space_may_use_yaml_words() -> None:
    space = {"flash_attention": (True, False), "n_gpu_layers": ("auto", "all", 0), "instance": (1, 2)}
    choices = space_of(ENGINE, serving("llamacpp", space=space)).choices
    assert set(choices["flash_attention"]) == {None, "on", "off"}
    assert set(choices["n_gpu_layers"]) == {-1, 0, 9999}
    assert choices["instances"] == (1, 2)


def test_values_of_a_baseline_are_read_as_those_of_a_space() -> None:
    arguments = {"flash_attention": False, "instance": 2, "n_gpu_layers": "auto", "max_num_seqs": 4}
    read = ENGINE.parse(arguments)
    assert read == {"flash_attention": "off", "instances": 2, "n_gpu_layers": -1, "parallel": 4}
    assert ENGINE.parse(read) == read
    with pytest.raises(SpecError) as refused:
        ENGINE.parse({"kv_cache_type": "q9"})
    assert "kv_cache_type" in refused.value.key


def test_instances_have_disjoint_cores() -> None:
    servers = [started(cores(), index, instances=2) for index in (0, 1)]
    assert after(servers[0].argv, "--threads") == "1"
    assert servers[0].environment["OMP_WAIT_POLICY"] == "passive"
    places = [Hardware.of(cores()).cores(first, 1) for first in (0, 1)]
    assert [len(place) for place in places] == [1, 1]
    assert places[0] != places[1]
    assert Hardware.of(serving("llamacpp")).cores(0, 1) == ()


def test_flags_that_flagcore_gives_itself_are_refused_with_a_reason() -> None:
    for flag, key in (("port", "port"), ("-m", "model"), ("no_slots", "slots")):
        with pytest.raises(SpecError) as error:
            ENGINE.axes(cores(engine_args={flag: 1}))
        assert error.value.key == f"serve.engine_args.{key}"


def test_a_misspelt_flag_is_found_before_launch_with_a_server_wheel() -> None:
    with pytest.raises(SpecError, match="did you mean cache-reuse"):
        ENGINE.axes(cores(engine_args={"cache_resue": 1}))
    assert argv(cores(engine_args={"new_flag": 1}, command=("/bin/echo",)))[-2:] == ("--new-flag", "1")


def test_a_flag_that_is_a_knob_fixes_it_for_all_candidates() -> None:
    task = cores(engine_args={"np": 2, "flash-attn": True, "max_model_len": 512, "no_cache_prompt": True})
    defaults = ENGINE.defaults(task)
    assert (defaults["parallel"], defaults["flash_attention"], defaults["context_len"]) == (2, "on", 512)
    words = argv(task)
    assert after(words, "--ctx-size") == "1024"
    assert "--no-cache-prompt" in words
    assert {axis.values for axis in ENGINE.axes(task) if axis.knob in ("parallel", "context_len")} == {(2,), (512,)}


def test_other_flags_reach_the_server_in_its_spelling() -> None:
    arguments = {"mg": 1, "cont_batching": False, "fit": False, "warmup": True, "kv_offload": True, "cache-ram": 64}
    words = argv(cores(engine_args=arguments))
    spelt = ("-mg", "1", "--no-cont-batching", "-fit", "off", "--warmup", "--kv-offload", "--cache-ram", "64")
    assert words[-len(spelt) :] == spelt
    assert ("--cache-ram", "0") not in pairwise(words)


def test_the_host_keeps_prompts_that_are_shared() -> None:
    def kept(turns: int, **arguments: int) -> tuple[bool, float]:
        loads = (replace(LOAD, turns=turns, num_prompts=64, concurrency=8),)
        task = cores(loads=loads, engine_args=arguments)
        figures = ENGINE.predict(task, row(ENGINE, task, parallel=2), costs()).figures
        hit_rate = float(figures.get("cache_hit_rate", np.zeros(1))[0])
        return ("--cache-ram", "0") not in pairwise(argv(task, parallel=2)), hit_rate

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
    words = argv(task, speculation="draft-simple")
    assert (after(words, "--spec-type"), after(words, "--spec-draft-model")) == ("draft-simple", "draft.gguf")
    assert not [word for word in argv(task) if word.startswith("--spec")]


def test_an_unknown_llama_cpp_knob_is_reported_with_the_nearest_one() -> None:
    with pytest.raises(SpecError) as refused:
        ENGINE.axes(cores(space={"ubatchsize": (1,)}))
    assert refused.value.key == "auto_tuner.space.ubatchsize"
    assert "ubatch_size" in refused.value.problem + refused.value.fix
    with pytest.raises(SpecError) as error:
        ENGINE.axes(cores(space={"block_size": (16,)}))
    assert error.value.key == "auto_tuner.space.block_size"


def test_values_of_log_and_props_are_read_back() -> None:
    assert ENGINE.reports.effective(lambda path: PROPS, LOG) == {
        "parallel": 4,
        "context_len": 512,
        "batch_size": 2048,
        "ubatch_size": 256,
        "flash_attention": "on",
        "kv_cache_type": "q8_0",
        "threads": 2,
        "threads_batch": 1,
        "kv_unified": "off",
    }


def test_layers_on_the_device_are_reported_unless_all_are_there() -> None:
    some = ENGINE.reports.effective(lambda path: PROPS, "load_tensors: offloaded 18/37 layers to GPU")
    effective = ENGINE.reports.effective(lambda path: PROPS, "load_tensors: offloaded 37/37 layers to GPU")
    assert some["n_gpu_layers"] == 18
    assert "n_gpu_layers" not in effective


def test_a_server_that_reports_few_values_is_accepted() -> None:
    assert ENGINE.reports.effective(lambda path: PROPS, "nothing") == {"parallel": 4, "context_len": 512}


def test_the_settings_match_the_effective_settings_of_llama_cpp() -> None:
    task = cores()
    found = ENGINE.settings(task, row(ENGINE, task, parallel=8, batch_size=256, kv_cache_type="q8_0"))
    assert found.max_running.item() == 8
    assert (found.max_batched_tokens.item(), found.pass_tokens.item()) == (256, 256)
    assert found.context_len.item() == 256
    assert found.devices.item() == 2
    elements = 8 * 256 * DENSE.num_layers * 2 * DENSE.num_query_groups * DENSE.kv_channels
    assert found.cache_bytes.item() == pytest.approx(elements * 34 / 32 / 2)
    assert ENGINE.settings(task, row(ENGINE, task, threads=1)).devices.item() == 1


def test_the_default_uses_the_cards_that_the_weights_need() -> None:
    small = serving("llamacpp", memory=10**6)
    assert ENGINE.defaults(small)["pipeline_model_parallel_size"] == 1
    large = replace(DENSE, num_layers=64, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64)
    assert ENGINE.defaults(serving("llamacpp", model=large, devices=8))["pipeline_model_parallel_size"] == 2


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("E ggml_aligned_malloc: insufficient memory (attempted to allocate 585939.00 MB)", TrialState.OUT_OF_MEMORY),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1 MiB: cudaMalloc failed: out of memory", None),
        ("E llama_init_from_model: quantized V cache requires flash_attn to be enabled", TrialState.INVALID),
        ("llama-server: error: unrecognized arguments: --nope 3", TrialState.INVALID),
        ("E srv init: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", TrialState.FAILED),
    ],
)
def test_log_lines_are_classified(line: str, state: TrialState | None) -> None:
    first = next(known for known in ENGINE.reports.failures if re.search(known.pattern, line))
    assert first.state is (state or TrialState.OUT_OF_MEMORY)


def test_servers_cannot_be_started_without_weights(tmp_path: Any) -> None:
    for arguments in (None, str(tmp_path)):
        with pytest.raises(SpecError) as error:
            ENGINE.program.ready(serving("llamacpp", weights=arguments).spec)
        assert (error.value.key, error.value.value) == ("serve.weights", arguments)
    weights = tmp_path / "m.gguf"
    weights.touch()
    with pytest.raises(NoDevice, match="no-such-server"):
        ENGINE.program.ready(serving("llamacpp", weights=str(weights), command=("no-such-server",)).spec)
