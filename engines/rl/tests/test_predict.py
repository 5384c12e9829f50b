"""Laws of predicted steps, and the rules of the space."""

from collections.abc import Mapping
from typing import Any

import pytest
from flagcore_rl.job import Lengths
from flagcore_rl.lengths import quantiles

from flagcore import api
from flagcore.api.inputs import open_spec
from flagcore.errors import SpecError

MODEL = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 4096, "vocab_size": 32000}
LENGTHS = {"mean": 300.0, "longest": 1024}


def record(candidate: Mapping[str, Any] = {}, devices: int = 8, **rl: Any) -> dict[str, Any]:
    """A job record on some devices, with changes."""
    job = {
        "engine": "nemo-rl",
        "trainer": {"engine": "megatron"},
        "rollout": {"engine": "vllm"},
        "prompts": 16,
        "samples": 8,
        "prompt_len": {"mean": 64.0, "longest": 128},
        "answer_len": LENGTHS,
        **rl,
    }
    cluster = {"chip": "H100-SXM", "devices": devices, "devices_per_node": 8}
    return {"id": "a", "kind": "rl", "model": MODEL, "cluster": cluster, "rl": job, "candidate": dict(candidate)}


def predicted(*records: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The predictions of job records."""
    answers = list(api.estimate_jobs({**each, "id": str(number)} for number, each in enumerate(records)))
    assert [each["status"] for each in answers] == ["ok"] * len(answers), answers
    return answers


def seconds(answer: Mapping[str, Any]) -> float:
    return float(answer["step_time_s"]["value"])


@pytest.mark.parametrize("apart", [{}, {"rollout_devices": 4}, {"rollout_devices": 4, "staleness": 1}])
def test_a_longer_tail_never_makes_a_step_shorter(apart: Mapping[str, Any]) -> None:
    tails = [
        {**LENGTHS, "longest": longest, "spread": spread} for longest in (512, 1024, 4096) for spread in (0.4, 0.9)
    ]
    candidate = {**apart, "micro_batch_tokens": 8192}
    tails.sort(key=lambda each: (each["spread"], each["longest"]))
    times = [seconds(each) for each in predicted(*(record(candidate, staleness=1, answer_len=tail) for tail in tails))]
    assert times[:3] == sorted(times[:3])
    assert times[3:] == sorted(times[3:])


def test_more_rollout_devices_never_make_generation_longer() -> None:
    answers = predicted(*(record({"rollout_devices": number}, 16) for number in (8, 12, 14, 15)))
    times = [each["time"]["generation_s"] for each in answers]
    assert times == sorted(times, reverse=True)


def test_colocated_memory_is_the_sum_unless_one_role_makes_room() -> None:
    kept = {"trainer": {"engine": "megatron", "offload": "none"}, "rollout": {"engine": "vllm", "sleeps": False}}
    apart, together, asleep = predicted(record({"rollout_devices": 4}), record(**kept), record())
    used = [each["memory"]["device_used_gib"] for each in (apart, asleep, together)]
    assert used == sorted(used)
    assert used[1] < used[2]


def test_parts_add_up_and_staleness_hides_generation() -> None:
    on_policy, stale = predicted(
        record({"rollout_devices": 4}), record({"rollout_devices": 4, "staleness": 1}, staleness=1)
    )
    for each in (on_policy, stale):
        assert sum(each["time"].values()) == pytest.approx(seconds(each))
    assert seconds(stale) < seconds(on_policy)
    assert stale["time"]["generation_s"] < on_policy["time"]["generation_s"]


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ({"staleness": 1}, "staleness needs rollout_devices"),
        ({"rollout_devices": 8}, "leave devices for the trainer"),
        ({"tensor_model_parallel_size": 3}, "must divide the devices of the trainer"),
        ({"rollout_devices": 4, "rollout_tensor_parallel_size": 8}, "must divide those of the rollout"),
        ({"pipeline_model_parallel_size": 8}, "PP must divide the layers"),
    ],
)
def test_illegal_candidates_say_why(candidate: Mapping[str, Any], reason: str) -> None:
    (answer,) = api.estimate_jobs([record(candidate)])
    assert answer["status"] == "invalid"
    assert reason in answer["reason"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"mini_batch": 100}, "rl.mini_batch"),
        ({"answer_len": {"mean": 5000.0, "longest": 1024}}, "rl.answer_len.mean"),
    ],
)
def test_bad_input_is_one_message(change: Mapping[str, Any], key: str) -> None:
    data = record(**change)
    with pytest.raises(SpecError) as raised:
        open_spec({"model": MODEL, "cluster": {"chip": "H100-SXM", "devices_per_node": 8}, "rl": data["rl"]})
    assert raised.value.key == key


def test_lengths_keep_their_mean_and_reach_the_longest() -> None:
    found = quantiles(Lengths(mean=800.0, longest=1024), 500)
    assert sum(found) / 500 == pytest.approx(800.0, rel=0.01)
    assert found[0] == 1024


def test_a_space_places_both_roles() -> None:
    data = {"model": MODEL, "cluster": {"chip": "H100-SXM", "devices_per_node": 8}, "rl": record(staleness=1)["rl"]}
    data["auto_tuner"] = {"space": {"context_parallel_size": 1, "micro_batch_tokens": 1152}}
    space = open_spec(data, plan=True).problem.space
    values = space.choices
    assert values["rollout_devices"][0] is None
    assert set(values["staleness"]) == {0, 1}
