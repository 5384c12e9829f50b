"""LMDeploy: knobs, rules, settings, the command line and what is read back, as its documentation has them."""

import json
from typing import Any

import numpy as np
import pytest
from flagcore_lmdeploy.engine import ENGINE
from flagcore_models.catalogue import public_model
from flagcore_serving.load.result import GENERATE
from flagcore_serving.load.stream import Stream
from flagcore_serving.load.traffic import body
from flagcore_serving.space.weights import weight_bytes

from engines.serving.tests.engines.tasks import figures, planned, settings
from flagcore.api.commands import doctor as inspection
from flagcore.api.commands.doctor import doctor
from flagcore.domain.spec import Task


def cards(**arguments: Any) -> Task:
    return planned("lmdeploy", **arguments)


def test_the_cache_is_a_share_of_the_memory_without_weights() -> None:
    task = cards(memory=24 * 2**30)
    with np.errstate(divide="raise"):  # of a model without states
        assert figures(task)
    free = 24 * 2**30 - weight_bytes(task)
    assert settings(task).cache_bytes == pytest.approx(0.8 * free)
    assert settings(task, cache_max_entry_count="0.5").cache_bytes == pytest.approx(0.5 * free)
    buffers = 2.0 * (8192 + 2 * 128) * task.spec.model.vocab_size
    assert settings(task, backend="pytorch").cache_bytes == pytest.approx(0.8 * (free - buffers))
    assert settings(task, kv_cache_type="int4").cache_element_bytes == 0.5


def test_states_are_set_aside_for_the_whole_batch() -> None:
    """LMDeploy issue 4558: Qwen3.6-27B-AWQ leaves one V100 no memory for 128 sequences and a cache."""
    task = cards(memory=32 * 2**30, model=public_model("Qwen/Qwen3.6-27B"), precision="int4")
    states = 48 * (2 * 48 * 128 * 128 + 2 * 3 * 10240)
    free = 32 * 2**30 - weight_bytes(task)
    for batch in (16, 128):
        found = settings(task, max_batch_size=batch)
        assert found.state_share * found.cache_bytes == pytest.approx(batch * states)
        assert found.cache_bytes == pytest.approx(batch * states + 0.8 * max(free - batch * states, 0.0))


@pytest.mark.parametrize(
    ("name", "architecture", "batch"),
    [("A100-80GB", "sm_80", 384), ("H200-NVL", "sm_90", 1024), ("H20", "sm_90", 128), ("C500", "xcore1000", 256)],
)
def test_the_default_batch_follows_the_name_of_the_device(name: str, architecture: str, batch: int) -> None:
    task = planned("lmdeploy", chip={"name": name, "architecture": architecture})
    assert settings(task).max_running.item() == batch


def test_a_request_has_token_ids_and_a_streamed_answer() -> None:
    sent = json.loads(body("m", np.array([5, 6, 7]), 2, GENERATE))
    assert (sent["input_ids"], sent["max_tokens"], sent["ignore_eos"]) == ([5, 6, 7], 2, True)
    stream = Stream()
    for result, finish in ((1, None), (2, {"type": "length"})):
        meta = {"prompt_tokens": 3, "completion_tokens": result, "finish_reason": finish}
        event = json.dumps({"text": "a", "output_ids": [9], "meta_info": meta})
        stream.feed(f"data: {event}\n\n".encode(), 10.0 + result)
    stream.feed(b"data: [DONE]\n\n", 12.0)
    answer = stream.answer(sent_s=10.0, start_s=0.0, input_tokens=3, output_tokens=2, target=0)
    assert (answer.ttft_s, answer.tpot_s) == (1.0, 1.0)


def test_untested_support_is_reported_to_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "version", lambda name: "0.18.1")
    (part,) = [part for part in doctor() if part["name"] == "lmdeploy"]
    assert (part["ok"], part["fix"]) == ("untested", ENGINE.untested)
    assert True not in [part["ok"] for part in doctor() if "lmdeploy on this chip" in part["for"]]
