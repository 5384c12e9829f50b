"""Records of jobs, and the lines of their file."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

from flagcore.errors import SpecError
from flagcore.spec.jobs import read_job, read_job_lines
from tests.product.tasks import ENGINES, SHAPE

ErrorOf = Callable[..., SpecError]
RECORD: dict[str, Any] = {
    "id": "a#1",
    "kind": "train",
    "source": "somebody",
    "model": {"name": "tiny", **SHAPE},
    "cluster": {"chip": "Example 80G", "devices": 8, "devices_per_node": 4, "interconnect": "tin cans"},
    "train": {"seq_length": 128, "global_batch_size": 8, "precision": "nvfp4", "attention": "unfused", "notes": "?"},
    "candidate": {
        "tensor_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 3,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp", "core_attn"],
        "pipeline_schedule": "zb-h1",
    },
    "measured": {"step_time_s": float("nan")},
}


def changed(path: tuple[str, ...], value: object) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


def test_a_record_becomes_a_job_and_unknown_keys_are_ignored() -> None:
    job = read_job(RECORD, ENGINES)
    assert (job.id, job.work.kind, job.chip, job.devices, job.devices_per_node) == ("a#1", "train", "Example 80G", 8, 4)
    assert (job.model.name, job.model.kv_channels) == ("tiny", 16)
    assert (job.work.precision, job.work.attention, job.work.implementation) == ("nvfp4", "unfused", None)
    settings = {"recompute_modules": "core_attn,mlp", "pipeline_schedule": "zb-h1"}
    assert job.work.settings == settings
    assert job.candidate == {key: value for key, value in RECORD["candidate"].items() if key not in settings}
    assert job.notes == "?"
    assert job.rank is None


@pytest.mark.parametrize("modules", ["mlp, core_attn", "mlp core_attn", ["core_attn", "mlp", "mlp"]])
def test_recompute_modules_are_one_sorted_text(modules: object) -> None:
    job = read_job(changed(("candidate", "recompute_modules"), modules), ENGINES)
    assert job.work.settings["recompute_modules"] == "core_attn,mlp"


@pytest.mark.parametrize("path", [("train",), ("train", "settings"), ("candidate",)])
def test_settings_may_be_in_three_places(path: tuple[str, ...]) -> None:
    record = changed(("train", "settings"), {})
    place = record
    for key in path:
        place = place[key]
    place |= {"overlap_grad_reduce": True, "no_overlap_p2p_communication": True, "exp_avg_dtype": None}
    found = read_job(record, ENGINES).work.settings
    assert found["overlap_grad_reduce"] is True
    assert found["overlap_p2p_comm"] is False
    assert not {"exp_avg_dtype", "no_overlap_p2p_communication"} & set(found)


@pytest.mark.parametrize("value", [True, False])
def test_a_setting_and_its_opposite_may_not_contradict_each_other(value: bool) -> None:
    arguments = {"overlap_p2p_comm": value, "no_overlap_p2p_communication": value}
    with pytest.raises(SpecError, match=r"no_overlap_p2p_communication.*is the negation of overlap_p2p_comm.*one of"):
        read_job(changed(("train", "settings"), arguments), ENGINES)
    agreed = read_job(
        changed(("train", "settings"), arguments | {"overlap_p2p_comm": not value}), ENGINES
    ).work.settings
    assert agreed["overlap_p2p_comm"] is not value


def test_settings_of_a_candidate_override_those_of_its_job() -> None:
    record = changed(("train", "settings"), {"pipeline_schedule": "1f1b", "expert_tensor_parallel_size": 4})
    job = read_job(record, ENGINES)
    assert job.work.settings["pipeline_schedule"] == "zb-h1"
    assert job.candidate["expert_tensor_parallel_size"] == 1


@pytest.mark.parametrize(
    ("path", "value", "key", "problem"),
    [
        (("kind",), "serve", "serve", "is missing"),
        (("kind",), "dance", "kind", "must be train"),
        (("id",), 5, "id", "must be a string"),
        (("rank",), 8, "rank", "below cluster.devices = 8"),
        (("rank",), -1, "rank", "from 0"),
        (("model",), "nowhere", "model", "is neither a path nor"),
        (("model", "hidden_size"), 66, "model.hidden_size", "divisible"),
        (("train", "precision"), "BF16", "train.precision", "bf16"),
        (("candidate",), [], "candidate", "must be a mapping"),
        (("candidate", "micro_batch_size"), "2", "candidate.micro_batch_size", "a whole number"),
        (("candidate", "sequence_parallel"), 1, "candidate.sequence_parallel", "true or false"),
        (("candidate", "recompute_modules"), "core_atn", "candidate.recompute_modules[0]", "core_attn"),
        (("candidate", "moe_expert_imbalance"), 0.5, "candidate.moe_expert_imbalance", "from 1"),
        (("train", "cp_comm_type"), "p3p", "train.cp_comm_type", "a2a"),
    ],
)
def test_invalid_record_is_refused_by_its_key(
    error_of: ErrorOf, path: tuple[str, ...], value: object, key: str, problem: str
) -> None:
    error = error_of(read_job, changed(path, value), ENGINES)
    assert error.key.startswith(key.removesuffix("[0]"))
    assert problem in error.problem


SLIPS = [
    (("train", "seq_len"), 128, "train.seq_len", "did you mean seq_length?"),
    (("train", "settings"), {"fp8_gather": True}, "train.settings.fp8_gather", "fp8_param_gather"),
    (("cluster", "device_per_node"), 8, "cluster.device_per_node", "did you mean devices_per_node?"),
    (("candidate", "pp"), 2, "candidate.pp", "did you mean pipeline_model_parallel_size?"),
    (("train", "micro_batch_size"), 2, "train.micro_batch_size", "belongs under candidate"),
    (("micro_batch_size",), 2, "micro_batch_size", "belongs under candidate"),
    (("rnak",), 1, "rnak", "did you mean rank?"),
]


@pytest.mark.parametrize(("path", "value", "key", "fix"), SLIPS)
def test_a_misspelt_key_is_reported_with_the_right_one(
    error_of: ErrorOf, path: tuple[str, ...], value: object, key: str, fix: str
) -> None:
    error = error_of(lambda: read_job(changed(path, value), ENGINES))
    assert error.key == key
    assert "is not a known key" in error.problem
    assert fix in error.fix


def test_source_keys_may_be_at_any_usual_place_of_a_record() -> None:
    record = {**RECORD, "notes": "from a table", "comment": "?", "figure": 3, "revision": {"rank_order": 1}}
    record["cluster"] = {**RECORD["cluster"], "source": "page 2", "notes": ["a"], "nodes": 2}
    record["train"] = {**RECORD["train"], "source": "page 2", "engine": "megatron"}
    assert read_job(record, ENGINES) == read_job(RECORD, ENGINES)


@pytest.mark.parametrize(
    ("text", "rate"), [("NVLink, inter-node 800 Gbps", 25e9), ("IB 8x50GB/s", 100e9), ("tin cans", None)]
)
def test_the_network_of_a_node_is_read_from_its_interconnect(text: str, rate: float | None) -> None:
    assert read_job(changed(("cluster", "interconnect"), text), ENGINES).nic_bytes_per_second == rate


@pytest.mark.parametrize(
    ("cluster", "devices"), [({"nodes": 3}, 12), ({"devices": 2}, 2), ({"devices": 2, "nodes": 1}, 2)]
)
def test_nodes_may_be_set_if_they_match_the_allocation(cluster: dict[str, int], devices: int) -> None:
    assert read_job(changed(("cluster",), {"chip": "x", "devices_per_node": 4, **cluster}), ENGINES).devices == devices


def test_nodes_that_contradict_the_devices_are_reported(error_of: ErrorOf) -> None:
    error = error_of(lambda: read_job(changed(("cluster", "nodes"), 3), ENGINES))
    assert (error.key, error.value) == ("cluster.nodes", 3)
    assert "must be 2: cluster.devices = 8 at devices_per_node = 4" in error.problem
    error = error_of(lambda: read_job(changed(("cluster",), {"chip": "x", "devices_per_node": 4}), ENGINES))
    assert (error.key, error.problem) == ("cluster.devices", "is missing")
    error = error_of(
        lambda: read_job(changed(("cluster",), {"chip": "x", "devices_per_node": 8, "nodes": 10**6}), ENGINES)
    )
    assert error.key == "cluster.nodes"


WRONG = {
    "cut short": (b'{"id": "a", ', "cannot be read as JSON"),
    "a list": (b"[1]", "JSON object"),
    "no id": (b"{}", "id must be"),
    "a number for an id": (b'{"id": 1}', "id must be"),
    "a key given twice": (b'{"id": "a", "model": {"x": 1, "x": 2}}', "has the key 'x' twice"),
    "Latin 1": (b'{"id": "\xe9"}', "is not UTF-8 text"),
    "deep": (b'{"id": ' + b"[" * 100_000, "is nested too deep"),
    "many digits": (b'{"id": ' + b"9" * 5000 + b"}", "digits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_without_a_record_is_reported_by_file_and_number_and_the_next_is_read(name: str) -> None:
    line, words = WRONG[name]
    lines = io.BytesIO(b'{"id": "first"}\n\n' + line + b'\n{"id": "last"}')
    first, error, last = read_job_lines(lines, file="some.jsonl")
    assert (first, last) == ({"id": "first"}, {"id": "last"})
    assert isinstance(error, SpecError)
    assert error.key == "some.jsonl: line 3"
    assert words in error.problem


def test_a_byte_order_mark_is_accepted() -> None:
    assert list(read_job_lines(io.BytesIO(b'\xef\xbb\xbf{"id": "a"}\n'), file="x")) == [{"id": "a"}]
