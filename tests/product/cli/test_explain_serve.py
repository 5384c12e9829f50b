"""`flag explain` and `compare` of servers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.api.commands.explain import candidate_report
from flagcore.api.runs import load_snapshot
from flagcore.api.subject import allowed_rows
from flagcore.errors import NothingFits
from flagcore.report.result import TrialResult
from flagcore.tuner.stages.learn import learn
from tests.page_reading import run_data
from tests.product.cli.conftest import Flag
from tests.serving_trials import trial

SHAPE = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 4, "vocab_size": 1000}
SPEC: dict[str, Any] = {
    "model": SHAPE,
    "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB"},
    "serve": {"engine": "llamacpp", "profile": {"input_len": 32, "output_len": 16, "concurrency": 4}},
    "auto_tuner": {"space": {"instances": [1, 2], "parallel": [2, 4], "threads": [1, 2]}},
}


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., str]:
    def write(**sections: Any) -> str:
        data = {name: {**part, **sections.get(name, {})} for name, part in SPEC.items()}
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(data))
        return str(tmp_path / "spec.yaml")

    return write


def test_server_is_reported_by_its_objective_its_latencies_and_its_cache(flag: Flag, spec: Callable[..., str]) -> None:
    explanation = flag("explain", spec(), "instances 2, parallel 4, threads 1").out
    assert "output tok/s (80%: " in explanation
    assert "  p50: TTFT " in explanation
    assert "cache " in explanation
    account = json.loads(flag("explain", spec(), "parallel=3", "--json").out)
    assert account["state"] == "not in the space"
    assert "it would be legal, and would fit in memory" in account["because"]
    assert account["predicted"]["output_tokens_per_s"] > 0
    illegal = json.loads(flag("explain", spec(), "instances=3", "--json").out)
    assert illegal["rules"][0]["values"]["instances"] == 3
    assert illegal["changes"]["allowed"]["differs"]["instances"][0] == 3


def test_two_servers_are_compared_by_rate_latency_and_memory(flag: Flag, spec: Callable[..., str]) -> None:
    arguments = ("compare", "--spec", spec(), "instances 2, parallel 4, threads 1", "baseline")
    comparison = json.loads(flag(*arguments, "--json").out)
    assert comparison["figures"].keys() >= {"ttft_s.p50", "tpot_s.p50"}
    assert comparison["memory"]["cache"][0] > 0
    assert "~output tok/s" in flag(*arguments).out


def test_value_that_a_plugin_refuses_is_reported_with_its_reason(flag: Flag, spec: Callable[..., str]) -> None:
    pytest.importorskip("flagcore_metax", reason="the chip is this plugin's")
    cluster = {"chip": "C550", "devices_per_node": 8, "memory_per_device": "64GiB"}
    file = spec(cluster=cluster, serve={"engine": "vllm"}, auto_tuner={"space": {"instances": "auto"}})
    account = json.loads(flag("explain", file, "kv_cache_type=fp8", "--json").out)
    assert account["state"] == "illegal"
    assert account["because"][0].startswith("metax_fp8_cache: kv_cache_type = fp8")


def test_if_no_trial_met_the_limits_there_is_no_best(spec: Callable[..., str]) -> None:
    snapshot = load_snapshot(spec(serve={**SPEC["serve"], "slo": {"ttft_s": {"p99": 5.0}}}), None, ())
    space = snapshot.problem.space
    late_trials = [
        replace(trial(row, 10.0 * (row + 1), 9.0), candidate=space.candidate(row)) for row in range(len(space))
    ]
    limits = {"limits": snapshot.task.spec.work.slo, "fastest": late_trials[0].number}
    objective = {"name": snapshot.task.spec.objective}
    trials = [TrialResult.write(each) for each in late_trials]
    data = run_data(stopped_because="all is tried", objective=objective, trials=trials, **limits).data
    run: Any = SimpleNamespace(best=None, trials=late_trials, repeats=(), probes=(), imported=())
    run.folder, run.data, run.knobs, run.stopped_because = Path("run"), data, {}, data["stopped_because"]
    learned_snapshot = replace(snapshot, search_state=learn(late_trials), run=run)
    with pytest.raises(NothingFits, match="p99 TTFT <= 5 s"):
        candidate_report(learned_snapshot, "best")
    assert not allowed_rows(learned_snapshot).size
    saved = [*late_trials[:-1], replace(trial(len(late_trials) - 1, 1.0), candidate=late_trials[-1].candidate)]
    assert allowed_rows(replace(learned_snapshot, search_state=learn(saved))).tolist() == [len(late_trials) - 1]


def test_too_few_knobs_are_completed_by_the_fastest_candidate_and_the_next_are_listed() -> None:
    space = {"instances": [1, 2], "tensor_model_parallel_size": [1, 2], "max_num_seqs": [32, 64]}
    data = {
        "model": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
        | {"num_query_groups": 8, "vocab_size": 32000},
        "cluster": {"chip": "A100-80GB", "devices_per_node": 4},
        "serve": {"engine": "vllm", "profile": {"input_len": 256, "output_len": 32, "concurrency": 16}},
        "auto_tuner": {"space": space},
    }
    report = api.explain_candidate(data, "instances=2, tp=1")
    assert report.state == "open"
    assert report.candidate["max_num_seqs"] in space["max_num_seqs"]
    (other,) = report.matches
    assert {other.candidate["max_num_seqs"], report.candidate["max_num_seqs"]} == set(space["max_num_seqs"])
    assert (other.candidate["instances"], other.candidate["tensor_model_parallel_size"]) == (2, 1)
    assert other.expected_s >= (report.expected_s or 0.0)
    assert api.explain_candidate(data, "instances=4, tp=2").state == "illegal"
    assert not api.explain_candidate(data, "instances=2, tp=1, max_num_seqs=32").matches


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"tensor_model_parallel_size": "auto", "instances": 1}, "set instances, pipeline_model_parallel_size to auto"),
        ({"tensor_model_parallel_size": 4, "instances": "auto"}, "set tensor_model_parallel_size, pipeline_"),
    ],
)
def test_advice_on_idle_devices_names_knobs_that_are_not_auto(
    space: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, load = {"chip": "H100-SXM", "devices_per_node": 7}, {"input_len": 32, "output_len": 16, "concurrency": 4}
    serve = {"engine": "vllm", "profile": load}
    api.estimate({"model": SHAPE, "cluster": cluster, "serve": serve, "auto_tuner": {"space": space}})
    assert named in caplog.text


def test_idle_devices_of_the_fastest_candidate_are_named(caplog: pytest.LogCaptureFixture) -> None:
    cluster = {"chip": "H100-SXM", "devices_per_node": 7, "price_per_device_hour": 2}
    serve = {"engine": "vllm", "profile": {"input_len": 32, "output_len": 16, "concurrency": 1}}
    found = api.estimate({"model": SHAPE, "cluster": cluster, "serve": serve, "auto_tuner": {"objective": "cost"}})
    used = found.candidates[0]["candidate"]["instances"]
    assert used < 7
    assert f"uses {used} of 7 devices" in caplog.text
