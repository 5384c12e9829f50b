"""What plugins advise for a serving job, and latency limits that no candidate is predicted to keep."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_serving.job import Load, ServeSpec

from flagcore import api
from flagcore.domain.engine import PreferredSetting, TaskAdvice
from flagcore.domain.spec import Spec
from flagcore.errors import NothingFits
from tests import tasks
from tests.product.tasks import LLAMA_8B
from tests.tuner.stages.test_discover import advising, completed, loaded, plugin, spec


def test_auto_means_the_preferred_value_of_a_plugin() -> None:
    preferred = PreferredSetting(setting="engine_args.block-size", value=128, reason="kernels need it")
    plugins = loaded(a=advising(TaskAdvice(preferred=(preferred,))), x=plugin(tasks.CHIP))
    job = replace(spec(chip="test-chip", nodes=2), work=ServeSpec(engine="vllm", loads=()))

    def discovered(value: object) -> Spec:
        return completed(replace(job, space={} if value is None else {"block_size": value}), plugins).task.spec

    assert discovered(None).serve.engine_args == {"block-size": 128}
    assert discovered("auto").space == {"block_size": (128,)}
    assert discovered("auto").serve.engine_args == {}
    assert discovered((16, 32)).space == {"block_size": (16, 32)}


def test_a_plugin_can_leave_out_the_first_requests() -> None:
    plugins = loaded(a=advising(TaskAdvice(warmup=3)), x=plugin(tasks.CHIP))
    job = spec(chip="test-chip", nodes=2)
    loads = tuple(Load(warmup=requests) for requests in (0, 5))
    serve = completed(replace(job, work=ServeSpec(engine="vllm", loads=loads)), plugins).task.spec.serve
    assert [load.warmup for load in serve.loads] == [3, 5]


def limited_spec(load: dict[str, Any], slo: dict[str, Any], **tuner: Any) -> dict[str, Any]:
    space = {"instances": "auto", "tensor_model_parallel_size": "auto"}
    return {
        "model": LLAMA_8B,
        "cluster": {"chip": "A100-80GB", "devices_per_node": 8},
        "serve": {
            "engine": "vllm",
            "profile": {"input_len": 1024, "output_len": 128, "num_prompts": 128, **load},
            "slo": slo,
        },
        "auto_tuner": {"space": space, **tuner},
    }


def test_candidates_name_the_limits_that_they_exceed() -> None:
    found = api.estimate(limited_spec({"concurrency": 64}, {"tpot_s": {"p99": 0.012}}), top=100)
    assert {tuple(each) for each in [each["slo"] for each in found.candidates]} == {(), ("tpot_s.p99",)}
    assert all(each["tpot_s"]["p99"] <= 0.012 for each in found.candidates if not each["slo"])
    assert (found.unmet, "slo" in api.estimate(limited_spec({}, {})).candidates[0]) == ("", False)


def test_if_no_candidate_keeps_them_the_closest_is_named() -> None:
    found = api.estimate(limited_spec({"concurrency": 128}, {"tpot_s": {"p99": 0.015}}), top=100)
    assert all(each["slo"] for each in found.candidates)
    closest = min(each["tpot_s"]["p99"] for each in found.candidates)
    assert f"tpot_s.p99 ~{closest:.3g} s of 0.015 s" in found.unmet


def test_limits_that_nothing_keeps_end_the_estimate() -> None:
    with pytest.raises(NothingFits, match=r"tpot_s\.p99"):
        api.estimate(limited_spec({"concurrency": 64}, {"tpot_s": {"p99": 0.0001}}))


def test_the_defaults_of_the_engine_are_shown_next_to_the_baseline() -> None:
    data = limited_spec({}, {})
    del data["auto_tuner"]
    found = api.estimate(data)
    assert found.defaults["candidate"]["instances"] == 1
    assert found.baseline["candidate"]["instances"] == 8
    assert found.baseline["output_tokens_per_s"] > found.defaults["output_tokens_per_s"]


def test_weights_are_the_model_if_the_spec_has_no_other(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"vocab_size": 1000}))
    data = limited_spec({}, {})
    data["serve"]["weights"] = str(tmp_path)
    del data["model"]
    assert api.estimate(data).candidates
