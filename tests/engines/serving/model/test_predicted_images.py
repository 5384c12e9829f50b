"""Images in predictions, rules and knobs of serving engines."""

from dataclasses import replace
from typing import Any

import pytest
from flagcore_lmdeploy.profile import WORKLOAD as LMDEPLOY

from flagcore.domain.prediction import Predictions
from flagcore.domain.serving import Images, Load
from flagcore.domain.spec import Task
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as LLAMACPP
from flagcore.engines.serving.sglang.profile import WORKLOAD as SGLANG
from flagcore.engines.serving.space.hardware import CHAT_TOKENS, longest_request
from flagcore.engines.serving.vllm.profile import WORKLOAD as VLLM
from flagcore.errors import SpecError
from tests import served
from tests.engines.serving.engines.tasks import broken, merged, row, serving
from tests.small import DENSE, VISION

ENGINES: dict[str, Any] = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP, "lmdeploy": LMDEPLOY}
SEEN = replace(DENSE, vision=VISION)
TOWER = "mm_encoder_tp_mode"
LARGE = replace(served.DENSE, vision=VISION)


def images(*sizes: tuple[int, int], count: int = 1) -> Images:
    sizes = sizes or ((1280, 720),)
    return Images(buckets=tuple((*size, 1.0 / len(sizes)) for size in sizes), base_items_per_request=count)


def load(found: Images | None, **changes: Any) -> Load:
    return Load(**{"input_len": 64, "output_len": 16, "num_prompts": 24, "concurrency": 4, "images": found} | changes)


def task(found: Images | None, engine: str = "vllm", **arguments: Any) -> Task:
    version = {"vllm": "0.32.0", "sglang": "0.5.12"}.get(engine)
    loads = arguments.pop("loads", (load(found),))
    return serving(engine, **{"loads": loads, "engine_version": version, "model": LARGE, **arguments})


def predicted(found: Images | None, engine: str = "vllm", *, values: dict[str, Any] | None = None, **more: Any) -> Any:
    job = task(found, engine, **more)
    job = replace(job, cluster=replace(job.cluster, groups=(replace(job.cluster.groups[0], chip=served.CHIP),)))
    return ENGINES[engine].predict(job, row(ENGINES[engine], job, **values or {}), served.costs())


def ttft(predictions: Predictions) -> float:
    return float(predictions.figures["ttft_s.mean"][0])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_larger_and_more_images_take_longer_to_the_first_token(engine: str) -> None:
    loads = [None, images((280, 280)), images((1280, 720)), images((1280, 720), count=3)]
    times = [ttft(predicted(each, engine)) for each in loads]
    assert times == sorted(times)
    assert times[2] > times[0] + 0.02  # the front end alone takes 25 ns per pixel


def test_the_tower_takes_memory_even_without_images() -> None:
    text, seen = predicted(None, model=served.DENSE), predicted(None)
    less = float(text.figures["kv_cache_gib"][0] - seen.figures["kv_cache_gib"][0]) * 2**30
    assert less > 2 * VISION.weights
    assert VISION.weights == pytest.approx(0.676e9, rel=0.01)  # published: 0.67 billion
    off = predicted(None, engine_args={"language_model_only": True})
    assert off.figures["kv_cache_gib"] == pytest.approx(text.figures["kv_cache_gib"])


def test_whole_towers_work_on_several_images_at_once() -> None:
    values = {"tensor_model_parallel_size": 4}
    whole = {**values, TOWER: "data"}
    many = images((1280, 720), count=4)
    assert ttft(predicted(many, values=values)) != ttft(predicted(many, values=whole))
    one = images((2240, 2240))
    assert ttft(predicted(one, values=values)) < ttft(predicted(one, values=whole))
    caches = [float(predicted(many, values=each).figures["kv_cache_gib"][0]) for each in (values, whole)]
    assert caches[1] < caches[0]


def test_the_context_holds_the_largest_images() -> None:
    found = load(images((280, 280), (1280, 720), count=2))
    assert longest_request((found,), VISION) == 64 + 16 + 2 * 1198 + CHAT_TOKENS
    assert longest_request((found,), None) == 80


@pytest.mark.parametrize(
    ("engine", "arguments", "word"),
    [
        ("llamacpp", {}, "mmproj"),
        ("llamacpp", {"engine_args": {"mmproj": "x.gguf"}, "model": DENSE}, "qwen2_5_vl"),
        ("vllm", {"model": DENSE}, "qwen2_5_vl"),
        ("sglang", {"model": DENSE}, "qwen2_5_vl"),
        ("lmdeploy", {"model": DENSE}, "qwen2_5_vl"),
        ("vllm", {"engine_args": {"runner": "pooling"}}, "runner"),
        ("vllm", {"engine_args": {"--language-model-only": True}}, "language-model-only"),
        ("sglang", {"engine_args": {"is_embedding": True}}, "is-embedding"),
    ],
)
def test_servers_that_cannot_take_images_are_refused(engine: str, arguments: dict[str, Any], word: str) -> None:
    workload: Engine = ENGINES[engine]
    with pytest.raises(SpecError) as raised:
        workload.rules(task(images(), engine, **arguments))
    assert raised.value.key == "serve.profile.images"
    assert word in raised.value.problem
    assert raised.value.fix
    workload.rules(task(None, engine, **arguments))
    LLAMACPP.rules(task(images(), "llamacpp", engine_args={"mmproj": "x.gguf"}))


def test_images_of_a_trace_need_a_tower(tmp_path: Any) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"prompt": "a", "max_tokens": 1, "images": ["8x8"]}')
    job = task(None, model=DENSE, loads=(Load(trace=str(trace), num_prompts=None, concurrency=1),))
    with pytest.raises(SpecError) as raised:
        VLLM.rules(job)
    assert raised.value.key == "serve.profile.trace"


def test_limits_of_images_must_hold_a_request() -> None:
    job = task(images(count=3))
    assert broken(VLLM, job, limit_mm_per_prompt=2) == ["images_of_request"]
    assert broken(VLLM, job, limit_mm_per_prompt=3) == []


def test_a_tower_is_shared_by_several_ranks_only() -> None:
    split = {"tensor_model_parallel_size": 2, TOWER: "data"}
    for engine in ("vllm", "sglang"):
        seen, text = task(images(), engine), task(None, engine, model=DENSE)
        workload = ENGINES[engine]
        assert merged(workload, seen, **split)[TOWER] > 0
        assert merged(workload, seen, **{**split, "tensor_model_parallel_size": 1})[TOWER] == 0
        assert merged(workload, seen, **{**split, TOWER: "weights"})[TOWER] == 0
        assert merged(workload, text, **split)[TOWER] == 0
        auto = next(axis for axis in workload.axes(task(images(), engine, space={TOWER: "auto"})) if axis.knob == TOWER)
        assert set(auto.values) == {"weights", "data"}
