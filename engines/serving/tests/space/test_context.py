import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_models.config import context_of
from flagcore_serving.advice import spec_warnings
from flagcore_serving.job import Load
from flagcore_serving.space.hardware import longest_request
from flagcore_vllm.engine import ENGINE as ENGINE

from engines.serving.tests.engines.tasks import LOAD, broken, serving
from tests.checks import refuses


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
        ({}, None),
    ],
)
def test_context_of_a_config_includes_its_rope_scaling(config: dict[str, Any], tokens: int | None) -> None:
    assert context_of(config) == tokens


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

    assert contexts(4096) == (None,)
    assert contexts(1 << 30) == (1024,)


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
    ],
)
def test_a_spec_that_may_mislead_has_a_warning(arguments: dict[str, Any], warned: str) -> None:
    objective = arguments.get("objective", "tpot_s.p99")
    work = {key: value for key, value in arguments.items() if key != "objective"}
    lines = [*spec_warnings(replace(serving("vllm", **work).spec, objective=objective), ENGINE.program)]
    assert len(lines) == bool(warned)
    assert all(warned in line for line in lines)
