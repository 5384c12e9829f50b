"""llama.cpp for real: the wheel's server with a small model of random weights, under the client and in a trial."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from flagcore_llamacpp.engine import ENGINE as ENGINE
from flagcore_models.gguf import context_length, gguf_shape
from flagcore_serving.job import Load
from flagcore_serving.load.figures import TASK_S, TURN_TTFT
from flagcore_serving.load.traffic import traffic
from flagcore_serving.model.prompts import prompt_parts
from flagcore_serving.model.simulated_load import SimulatedLoad
from flagcore_serving.model.tiers import cached_tokens
from flagcore_serving.space.hardware import Hardware
from flagcore_serving.trial.failures import TrialFailure, log_text
from flagcore_serving.trial.servers import Server

from engines.models.tests.examples import mixed
from engines.serving.tests.engines.tasks import (
    LOAD,
    SIZES,
    broken,
    figures,
    merged,
    row,
    server,
    serving,
    settings,
    space_of,
    started,
    tiny_model,
)
from engines.serving.tests.load.servers import send
from engines.serving.tests.trial import trials
from engines.serving.tests.trial.test_misbehaving_servers import all_gone
from flagcore.api.commands.run import plan_server
from flagcore.domain.spec import Control, Task
from flagcore.domain.trial import TrialState
from flagcore.errors import NoDevice, SpecError
from flagcore.launchers.network import free_port
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


def test_a_context_of_0_is_that_of_the_model_and_public_gguf_files_are_downloaded() -> None:
    task = cores(engine_args={"ctx-size": 0})
    public = replace(task.spec.work, weights="ggml-org/gpt-oss-20b-GGUF")
    task = replace(task, spec=replace(task.spec, work=public))
    words = server(task, parallel=8).argv
    assert [after(words, flag) for flag in ("--hf-repo", "--ctx-size")] == [public.weights, "0"]
    assert words.count("--ctx-size") == 1
    assert "--model" not in words
    assert settings(task, parallel=8).context_len == 131_072 // 8


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("Qwen/Qwen3-8B", "is no GGUF file"),
        ("a/Qwen3-8B-GGUF", "is taken in Q4_K_M, 4.89 bits"),
        ("m.gguf", "does not exist here"),
    ],
)
def test_weights_that_llama_cpp_cannot_load_and_formats_of_repositories_are_named(weights: str, said: str) -> None:
    task = cores()
    task = replace(task, spec=replace(task.spec, work=replace(task.spec.work, weights=weights, precision="q4_k_m")))
    assert any(f"{weights} {said}" in each for each in ENGINE.warnings(task))


def test_a_space_may_use_yaml_words() -> None:
    space = {"flash_attention": (True, False), "n_gpu_layers": ("auto", "all", 0), "instance": (1, 2)}
    choices = space_of(ENGINE, serving("llamacpp", space=space)).choices
    assert set(choices["flash_attention"]) == {None, "on", "off"}
    assert set(choices["n_gpu_layers"]) == {-1, 0, 9999}
    assert choices["instances"] == (1, 2)
    spelled = serving("llamacpp", space={"flash_attention": (1, "false")})  # `common/arg.cpp` @0216dab3: is_truthy
    assert set(space_of(ENGINE, spelled).choices["flash_attention"]) == {None, "on", "off"}


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
    space = {"speculation": (None, "ngram-simple", "draft-simple")}
    task = cores(engine_args={"spec-draft-model": "draft.gguf"}, space=space)
    assert not broken(ENGINE, task, speculation="draft-simple")
    assert merged(ENGINE, cores(), speculation="none")["speculation"] == 0
    words = server(task, speculation="draft-simple", speculative_tokens=2).argv
    assert (after(words, "--spec-type"), after(words, "--spec-draft-n-max")) == ("draft-simple", "2")
    drafted = [settings(task, speculation=each).drafted.item() for each in ("draft-simple", "ngram-simple")]
    assert drafted == [3, 0], "llama.cpp's default is 3"
    assert not [word for word in server(task).argv if word.startswith("--spec")]


def test_the_cache_has_the_elements_of_all_slots() -> None:
    task = cores()
    elements = 8 * 256 * DENSE.num_layers * 2 * DENSE.num_query_groups * DENSE.kv_channels
    assert settings(task, parallel=8, kv_cache_type="q8_0").cache_bytes.item() == pytest.approx(elements * 34 / 32 / 2)


@pytest.mark.parametrize(
    ("arguments", "values", "cells"),  # of windows of 128 and of the context, as in findings/llamacpp_window_cells.sh
    [
        ({"ctx-size": 4096}, {"parallel": 1}, (768, 4096)),
        ({"ctx-size": 4096}, {"parallel": 1, "ubatch_size": 2048}, (2304, 4096)),
        ({"ctx-size": 4096}, {"parallel": 4}, (4 * 768, 4 * 1024)),
        ({"ctx-size": 4096}, {"parallel": 4, "kv_unified": "on"}, (1024, 4096)),
        ({"ctx-size": 4096, "swa-full": True}, {"parallel": 4}, (4096, 4096)),
        ({"ctx-size": 2048}, {"parallel": 3}, (3 * 768, 3 * 768)),
    ],
)
def test_a_window_has_room_for_a_batch(arguments: Any, values: Any, cells: tuple[int, int]) -> None:
    model = mixed(DENSE, {"window": 128}, 2)
    task = serving("llamacpp", devices=1, weights="model.gguf", model=model, engine_args=arguments)
    token = 2 * 2 * DENSE.num_query_groups * DENSE.kv_channels
    expected = token * (cells[0] * 2 + cells[1] * (DENSE.num_layers - 2))
    assert settings(task, **values).cache_bytes.item() == expected
    assert figures(task, **values)["kv_cache_tokens"] == cells[1]


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
    latent = serving("llamacpp", model=serving_inputs.LATENT)
    assert broken(ENGINE, latent, tensor_model_parallel_size=2) == ["split_tensors"]
    assert not broken(ENGINE, latent, tensor_model_parallel_size=2, split_mode="row")
    assert not broken(ENGINE, serving("llamacpp"), tensor_model_parallel_size=2)


pytest.importorskip("xllamacpp", reason="pip install 'flagcore[llamacpp]' for a real server")
pytest.importorskip("gguf", reason="pip install 'flagcore[llamacpp]' to make a model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def task(model: str, **arguments: Any) -> Task:
    return serving("llamacpp", on_cores=True, devices=2, weights=model, **arguments)


@pytest.fixture
def running(model: str, tmp_path: Path) -> Iterator[Server]:
    """A server with four slots of 256 tokens."""
    values = {"parallel": 4, "context_len": 256, "threads": 2, "kv_unified": "off"}
    with started(ENGINE, task(model, engine_args={"cache-ram": 0}), values, tmp_path) as running:
        yield running


def counted(running: Server, name: str) -> float:
    found = re.search(rf"^llamacpp:{name} ([0-9.e+]+)$", running.fetch("/metrics"), re.MULTILINE)
    assert found
    return float(found[1])


@pytest.mark.spread
@pytest.mark.costly
def test_a_model_becomes_a_server_in_one_step(model: str, tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match="no H100-SXM on this machine"):
        plan_server(model, tmp_path, chip="H100-SXM")
    with pytest.raises(NoDevice, match="cannot serve"):
        plan_server(model, tmp_path, chip=None, engine="vllm")
    port = free_port()
    argv = [
        sys.executable,
        "-c",
        "from flagcore.cli import main; main()",
        "run",
        model,
        "--chip=auto",
        f"--port={port}",
    ]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [*takewhile(lambda line: not line.startswith("flag: ready at"), process.stderr)]
        assert any(model in line for line in lines), "the command is printed"
        with urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.spread
def test_a_trial_of_two_instances_runs_the_requested_settings(model: str, tmp_path: Path) -> None:
    requested = {
        "parallel": 4,
        "threads": 1,
        "threads_batch": 2,
        "batch_size": 256,
        "ubatch_size": 64,
        "flash_attention": "on",
        "kv_cache_type": "q8_0",
        "kv_unified": "off",
    }
    loads = (Load(input_len=100, output_len=30, num_prompts=8, concurrency=8),)
    where = trials.platform(tmp_path, "unused", loads=loads, command=None, weights=model, repeats=2)
    done = trials.run_here(where, tmp_path, instances=2, **requested)
    assert done.state is TrialState.MEASURED, done.reason
    assert done.measurement is not None
    assert {knob: done.measurement.effective[knob] for knob in requested} == requested
    assert len(done.measurement.step_times_s) == 2
    assert done.measurement.versions["llamacpp"]
    figures = done.measurement.figures
    assert figures["ttft_s.p50"] > 0
    assert figures["kv_cache_tokens"] == 2 * 4 * 256
    assert 10 * 2**20 < (done.measurement.device_used_bytes or 0) < 2**30
    assert figures["output_tokens_per_s_per_device"] == pytest.approx(figures["output_tokens_per_s"] / 2)
    assert all_gone(Path(model).parent)


@pytest.mark.spread
@pytest.mark.costly
def test_other_slots_have_the_same_answers_and_wrong_positions_others(model: str, tmp_path: Path) -> None:
    loads, control = (Load(input_len=24, output_len=8, num_prompts=8, concurrency=4),), Control(max_time_per_task=60.0)

    def folder(name: str, scale: float = 1.0, **values: Any) -> str:
        (place := tmp_path / name).mkdir()
        arguments = {"engine_args": {"rope-freq-scale": scale}, "weights": model, "loads": loads, "control": control}
        done = trials.run_here(trials.platform(place, "unused", command=None, **arguments), place, **values)
        assert done.state is TrialState.MEASURED, done.reason
        return str(place / "trial")

    base = folder("base", parallel=4)
    others = {"slots": folder("slots", parallel=2), "cache": folder("cache", parallel=4, kv_cache_type="q8_0")}
    others["positions"] = folder("positions", 0.25, parallel=4)
    where = trials.platform(tmp_path, "unused", control=control).task
    found = {name: ENGINE.answers(where, "changes", other, base) for name, other in others.items()}
    assert {name for name, each in found.items() if each and each.difference > each.limit} == {"positions"}
    assert None not in found.values()


@pytest.mark.slow
@pytest.mark.spread
def test_drafted_tokens_are_counted(model: str, tmp_path: Path) -> None:
    own_draft = task(model, engine_args={"spec-draft-model": model, "spec-draft-p-min": 0})
    values = {"speculation": "draft-simple", "parallel": 1, "context_len": 512}
    with started(ENGINE, own_draft, values, tmp_path) as running:
        load = Load(input_len=3, output_len=20, num_prompts=1, concurrency=1)
        assert send(running.url, load=load).problems == ()
        found = ENGINE.reports.read_counters(running.fetch)
    assert found["drafted_tokens"] > 0
    assert 0 <= found["accepted_tokens"] <= found["drafted_tokens"]


@pytest.mark.slow
@pytest.mark.spread
def test_the_defaults_of_llama_cpp_are_read_back(model: str, tmp_path: Path) -> None:
    with started(ENGINE, task(model), {}, tmp_path) as running:
        found = ENGINE.reports.effective(running.fetch, log_text(running.log))
    values = {"parallel": 4, "batch_size": 2048, "ubatch_size": 512, "kv_unified": "on", "kv_cache_type": "f16"}
    assert {knob: found[knob] for knob in values} == values
    expected = ENGINE.settings(task(model), {})
    assert (expected.max_running.item(), expected.context_len.item()) == (4, SIZES["context"])


@pytest.mark.slow
@pytest.mark.spread
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kv_cache_type": "q8_0", "flash_attention": "off"}, "quantized V cache requires flash_attn"),
        ({"parallel": 300}, "n_seq_max must be <="),
        ({"parallel": 64, "batch_size": 16}, "GGML_ASSERT"),
    ],
)
def test_values_that_the_rules_forbid_do_not_run(
    model: str, tmp_path: Path, values: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")  # which takes seconds
    with pytest.raises(TrialFailure, match=re.escape(says)) as caught, started(ENGINE, task(model), values, tmp_path):
        pass
    assert caught.value.state is TrialState.INVALID


@pytest.mark.slow
@pytest.mark.spread
def test_the_shape_comes_from_the_header(model: str) -> None:
    assert context_length(model) == SIZES["context"]
    assert gguf_shape(model) == {
        "num_layers": 2,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "vocab_size": 1024,
        "gated_linear_unit": True,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "add_qkv_bias": False,
    }


@pytest.mark.slow
@pytest.mark.spread
def test_server_counts_the_same_tokens_as_the_client(running: Server) -> None:
    load = Load(input_len=60, output_len=24, num_prompts=12, concurrency=6, range_ratio=0.5)
    result = send(running.url, load=load, vocab_size=1024)
    assert result.problems == ()
    assert result.completed == 12
    sent = sum(one.input_tokens for one in result.requests)
    # a first token that a slot has is not read again
    assert sent - 3 <= counted(running, "prompt_tokens_total") <= sent
    assert counted(running, "tokens_predicted_total") == sum(one.output_tokens for one in result.requests)
    times = [(one.tpot_s, one.ttft_s) for one in result.requests]
    # on a busy machine, the tokens of an answer arrive together: TPOT is 0
    assert all(tpot is not None and tpot >= 0 and ttft > 0 for tpot, ttft in times), times


@pytest.mark.slow
@pytest.mark.spread
def test_cached_tokens_of_conversations_are_those_that_the_prediction_expects(running: Server) -> None:
    load = Load(input_len=40, output_len=8, turns=4, num_prompts=16, concurrency=2)
    assert send(running.url, load=load).problems == ()
    expected = cached_tokens(prompt_parts(traffic(load), 0), capacity=1e9).sum()
    assert counted(running, "prompt_tokens_cached_total") == pytest.approx(expected, rel=0.02)


@pytest.mark.costly
@pytest.mark.spread
def test_the_host_has_the_prompts_that_the_prediction_expects(model: str, tmp_path: Path) -> None:
    """Six conversations take turns in two slots, and the host has room for all."""
    load = Load(input_len=150, output_len=16, turns=4, num_prompts=48, concurrency=6)
    values = {"parallel": 2, "context_len": 1024, "threads": 2, "kv_unified": "off"}
    with started(ENGINE, task(model, engine_args={"cache-ram": 4}, loads=(load,)), values, tmp_path) as running:
        result = send(running.url, load=load)
        assert result.problems == ()
        drawn = SimulatedLoad.draw(load)
        reach = 2 * sum(drawn.means) + 4 * 2**20 / 512  # bytes of a token in this model
        expected = cached_tokens(drawn.parts, reach, drawn.output_len.tolist(), whole=True).sum()
        assert counted(running, "prompt_tokens_cached_total") == pytest.approx(expected, rel=0.02)
        assert {TASK_S, TURN_TTFT.format(number=1), TURN_TTFT.format(number=4)} <= result.figures.keys()


@pytest.mark.slow
@pytest.mark.spread
def test_answer_that_does_not_fit_into_its_slot_is_reported_and_not_counted(running: Server) -> None:
    result = send(running.url, load=Load(input_len=200, output_len=100, num_prompts=2, concurrency=1))
    assert "tokens instead of 100; prompt and answer do not fit into the context of one request" in result.problems[0]
    assert not result.figures
