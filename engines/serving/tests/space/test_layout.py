"""What a spec without a space searches, the layout that an expert would start, devices, programs and sizes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_importers import programs
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_models.keys import context_of
from flagcore_models.layers import parameters
from flagcore_serving.advice import spec_warnings
from flagcore_serving.engine import ServingEngine
from flagcore_serving.job import Load, lengths_text
from flagcore_serving.space.hardware import longest_request, max_in_flight
from flagcore_serving.space.knobs import DEFAULT_SPACE
from flagcore_serving.space.weights import cache_bytes_per_token, min_devices
from flagcore_sglang.engine import ENGINE as SGLANG
from flagcore_vllm.engine import ENGINE as ENGINE
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines.tasks import LOAD, broken, serving, space_of
from flagcore.domain.model import Model
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore.errors import NoDevice
from flagcore.tuner.stages.build import build
from tests.checks import refuses
from tests.product.tasks import DENSE, costs

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
ALL = pytest.mark.parametrize("engine", [LLAMACPP, SGLANG, VLLM], ids=lambda each: each.name)
GIB = 2**30
LARGE = replace(DENSE, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, kv_channels=128)


def baseline(engine: ServingEngine, task: Task) -> dict[str, KnobValue]:
    """The baseline: what the rule of thumb takes of the usual space."""
    arguments = replace(task, spec=replace(task.spec, space=engine.usual_space(task)))
    space = build(engine.axes(arguments), engine.rules(arguments), engine.merges(arguments))
    predictions = engine.predict(task, space.columns(), costs(task, task.cluster.groups[0].memory_bytes))
    return space.candidate(engine.rule_of_thumb(task, space.columns(), predictions)).as_dict()


@ALL
def test_a_spec_without_a_space_searches_layouts_and_batch_limits(engine: ServingEngine) -> None:
    task = serving(engine.name, devices=4, default_space=True)
    names = {knob.name for knob in engine.knobs if set(knob.names) & set(DEFAULT_SPACE)}
    searched = {axis.knob for axis in engine.axes(task) if len(axis.values) > 1}
    assert {"instances", engine.split_by} < searched <= names
    assert {engine.device_counts(task, space_of(engine, task).columns()).max()} == {4}


@ALL
def test_with_a_space_other_knobs_have_the_engines_defaults(engine: ServingEngine) -> None:
    task = serving(engine.name, devices=4, space={"enable_prefix_caching": (True, False)})
    assert [axis.knob for axis in engine.axes(task) if len(axis.values) > 1] == ["enable_prefix_caching"]
    assert baseline(engine, task) == engine.defaults(task)


@ALL
def test_on_cores_the_engines_defaults_are_the_baseline(engine: ServingEngine) -> None:
    task = serving(engine.name, devices=4, on_cores=True, default_space=True)
    assert baseline(engine, task) == engine.defaults(task)


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("model", "memory", "objective", "instances", "tensor"),
    [
        (LARGE, 80 * GIB, "output_tokens_per_s", 8, 1),  # 15 GB of weights
        (LARGE, 19 * GIB, "output_tokens_per_s", 4, 2),  # they fit into one device, with little room for the cache
        (LARGE, 10 * GIB, "output_tokens_per_s", 2, 4),
        (LARGE, 80 * GIB, "ttft_s.p99", 1, 8),
    ],
)
def test_the_baseline_uses_all_devices_and_has_room_for_the_cache(
    engine: ServingEngine, model: Model, memory: int, objective: str, instances: int, tensor: int
) -> None:
    task = serving(engine.name, devices=8, model=model, memory=memory, default_space=True, objective=objective)
    found = baseline(engine, task)
    assert (found["instances"], found["tensor_model_parallel_size"]) == (instances, tensor)
    assert found["pipeline_model_parallel_size"] == 1


def test_the_baseline_takes_the_layouts_that_the_space_lists() -> None:
    task = serving("vllm", devices=8, space={"instances": (1, 2), "tensor_model_parallel_size": (2, 4)})
    assert (baseline(VLLM, task)["instances"], baseline(VLLM, task)["tensor_model_parallel_size"]) == (2, 4)


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda each: each.name)
def test_an_instance_may_have_a_power_of_two_of_the_devices(engine: ServingEngine) -> None:
    task = serving(engine.name, devices=12, space={engine.split_by: "auto"})
    (sizes,) = [axis.values for axis in engine.axes(task) if axis.knob == engine.split_by]
    assert set(sizes) == {1, 2, 3, 4, 6, 8, 12}


def test_the_longest_request_and_the_most_in_flight_are_over_all_loads() -> None:
    loads = (
        Load(input_len=100, output_len=10, concurrency=4),
        Load(input_len=50, output_len=10, prefix_len=60, range_spread=0.1, request_rate=2.0, num_prompts=7),
    )
    assert longest_request(serving("vllm", loads=loads)) == 126
    assert max_in_flight(loads) == 7


def test_weights_and_cache_are_counted_by_shape() -> None:
    llama = replace(
        DENSE,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128256,
    )
    assert parameters(llama) == pytest.approx(8.03e9, rel=0.001)  # Llama 3.1 8B
    assert cache_bytes_per_token(llama, 2.0) == 131072
    assert min_devices(serving("vllm", model=llama, memory=16 * 2**30)) == 2
    assert min_devices(serving("vllm", model=llama, memory=80 * 2**30)) == 1
    assert min_devices(serving("vllm", model=llama, memory=2**30, devices=4)) == 4


def test_the_interpreter_of_a_script_is_read_in_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    assert programs.interpreter(str(script)) == sys.executable
    script.write_text("#!/bin/sh\nexec vllm\n")
    assert programs.interpreter(str(script)) is None
    script.write_bytes(b"\x7fELF\x02\x01")
    assert programs.interpreter(str(script)) is None
    assert programs.interpreter(sys.executable) == sys.executable
    assert programs.package_folders(str(script)) == ()


def test_the_version_of_a_package_comes_from_the_interpreter() -> None:
    assert programs.package_version(sys.executable, "no-such-package", "pytest") == pytest.__version__
    assert programs.package_version(sys.executable, "no-such-package") == ""


@pytest.mark.parametrize(
    ("version", "numbers"), [("0.11.2rc1+cpu", (0, 11, 2)), ("v0.5", (0, 5, 0)), ("nightly-5b8c", None), ("", None)]
)
def test_a_release_is_read_from_unusual_versions(version: str, numbers: tuple[int, ...] | None) -> None:
    assert programs.release(version) == numbers


def test_a_missing_program_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match="no-such-engine"):
        programs.find_command(serving("vllm", command=("no-such-engine", "serve")).spec, ("vllm", "serve"))
    (tmp_path / "run").touch(mode=0o755)
    spec = serving("vllm", command=("./run", "x"), directory=str(tmp_path)).spec
    assert programs.find_command(spec, ("vllm",)) == (str(tmp_path / "run"), "x")


def task(folder: Path, load: Load = LOAD, context: int = 4096, **arguments: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return serving("vllm", weights=str(folder), command=("/bin/echo", "serve"), loads=(load,), **arguments)


def rope(tokens: int, **scaling: object) -> dict[str, Any]:
    return {"max_position_embeddings": tokens, "rope_scaling": scaling or None}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (rope(4096), 4096),
        (rope(4096, type="linear", factor=2.0), 8192),
        (rope(131072, rope_type="llama3", factor=8.0), 131072),
        (rope(32768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        (rope(163840, type="yarn", factor=40, original_max_position_embeddings=4096), 163840),
        ({"text_config": rope(8192)}, 8192),
        ({"model_type": "gemma3_text", **rope(131072, type="linear", factor=8.0)}, 131072),
        ({"max_position_embeddings": 9, "rope_parameters": {"full": {"rope_type": "default"}}}, 9),
        ({"max_position_embeddings": 9, "rope_parameters": {"full": {"rope_type": "linear", "factor": 8.0}}}, None),
        ({}, None),
    ],
)
def test_context_of_a_config_includes_its_rope_scaling(config: dict[str, Any], tokens: int | None) -> None:
    assert context_of(config) == tokens
    is_scaled = config.get("rope_scaling") and config["rope_scaling"].get("rope_type") == "yarn"
    assert context_of(config, scales_yarn=False) == (32768 if is_scaled else tokens)


@pytest.mark.parametrize(
    "load", [Load(input_len=4000, output_len=97), Load(input_len=700, output_len=128, distribution="lognormal")]
)
def test_request_longer_than_the_model_context_is_an_error(tmp_path: Path, load: Load) -> None:
    ENGINE.rules(task(tmp_path, replace(load, input_len=load.input_len // 2, output_len=64)))
    with refuses("serve.profile.input_len"):
        ENGINE.rules(task(tmp_path, load))


def test_trace_with_a_request_longer_than_the_model_context_is_an_error(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"input_len": n, "output_len": 10}) + "\n" for n in (100, 5000)))
    load = Load(trace=str(trace))
    assert longest_request(task(tmp_path, load)) == 5010
    with refuses("serve.profile.trace"):
        ENGINE.rules(task(tmp_path, load))
    ENGINE.rules(task(tmp_path, replace(load, num_prompts=1)))


def test_estimated_lengths_of_texts_size_the_context_but_are_not_an_error(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt": "长" * 6000, "max_tokens": 10}) + "\n")
    load = Load(trace=str(trace))
    assert longest_request(task(tmp_path, load)) == 9010
    ENGINE.rules(task(tmp_path, load))


def test_context_above_that_of_the_model_breaks_a_rule_unless_flags_extend_it(tmp_path: Path) -> None:
    assert broken(ENGINE, task(tmp_path), context_len=8192) == ["model_context"]
    assert not broken(ENGINE, task(tmp_path), context_len=4096)
    assert not broken(ENGINE, task(tmp_path, engine_args={"hf-overrides": "{}"}), context_len=8192)


def test_flags_that_break_a_rule_alone_are_named_as_they_were_written(tmp_path: Path) -> None:
    with refuses("serve.engine_args.max-model-len", 100) as caught:
        ENGINE.axes(task(tmp_path, engine_args={"max-model-len": 100}))
    assert "context_len" not in caught.value.problem


def test_context_is_set_by_default_only_if_the_memory_is_too_small_for_that_of_the_model(tmp_path: Path) -> None:
    def contexts(context: int) -> Any:
        job = task(tmp_path, context=context, default_space=True, devices=1)
        return next(axis.values for axis in ENGINE.axes(job) if axis.knob == "context_len")

    found = [contexts(1 << bits) for bits in range(12, 31)]  # where activations decide, both are tried
    assert list(dict.fromkeys(found)) == [(None,), (None, 1024), (1024,)]


def slo(count: int | None = None, **limits: float) -> dict[str, Any]:
    loads = (replace(LOAD, num_prompts=count),) if count else (LOAD,)
    return {"loads": loads, "slo": {name.replace("__", "."): limit for name, limit in limits.items()}}


def load(objective: str = "output_tokens_per_s", **fields: Any) -> dict[str, Any]:
    return {"loads": (Load(num_prompts=8, **fields),), "objective": objective}


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"engine_version": "9.9"}, "9.9"),
        ({"engine_version": "0.32.0+cpu"}, ""),
        (slo(399, ttft_s__p99=1.0), "too few"),
        (slo(400, ttft_s__p99=1.0), ""),
        (slo(40, ttft_s__p90=1.0, ttft_s__mean=1.0), ""),
        (slo(8, ttft_s__mean=1.0), ""),
        (load(request_rate=2.0), "the load determines"),
        (load("tpot_s.p99", request_rate=2.0), ""),
        (load(request_rate=float("inf")), ""),
        (load(concurrency=4), ""),
        (slo(ttft_s__mean=200.0), "limits are in seconds"),
        (slo(tpot_s__mean=50.0), "limits are in seconds"),
        (slo(ttft_s__mean=30.0, tpot_s__mean=1.0, e2e_s__mean=600.0), ""),
        ({"weights": "/nowhere/model.gguf"}, "serve.weights"),
        ({"weights": "Qwen/Qwen3-32B", "precision": "fp8"}, "not quantized"),
        ({"weights": "Qwen/Qwen3-32B", "precision": "fp8", "engine_args": {"quantization": "fp8"}}, ""),
        ({"weights": "Qwen/Qwen3-32B-FP8", "precision": "fp8"}, ""),
        ({"weights": "moonshotai/Kimi-K2.6", "precision": "int4"}, "trust-remote-code"),
        ({"weights": "moonshotai/Kimi-K2.6", "precision": "int4", "engine_args": {"trust_remote_code": True}}, ""),
    ],
)
def test_a_spec_that_may_mislead_has_a_warning(arguments: dict[str, Any], warned: str) -> None:
    objective = arguments.get("objective", "tpot_s.p99")
    work = {key: value for key, value in arguments.items() if key != "objective"}
    lines = [*spec_warnings(replace(serving("vllm", **work).spec, objective=objective), ENGINE.program)]
    assert len(lines) == bool(warned)
    assert all(warned in line for line in lines)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [({}, ""), ({"range_spread": 0.25}, "25%"), ({"range_ratio": 0.5}, "50%"), ({"distribution": "chat"}, "average")],
)
def test_lengths_that_differ_are_said(lengths: dict[str, Any], said: str) -> None:
    fixed, text = lengths_text(Load(input_len=1000)), lengths_text(Load(input_len=1000, **lengths))
    assert text.startswith(fixed)
    assert said in text
    assert bool(said) == (text != fixed)
