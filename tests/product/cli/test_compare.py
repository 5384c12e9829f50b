"""`flag compare` of two candidates part by part, and `flag explain` of servers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.api.commands.compare import compare_subjects, overlap
from flagcore.api.commands.explain import candidate_report
from flagcore.api.snapshot import load_snapshot
from flagcore.api.subject import Subject, allowed_rows, columns_of
from flagcore.domain.trial import TrialState
from flagcore.errors import NothingFits
from flagcore.report.candidate_report import CORRECTED, PREDICTED
from flagcore.report.result import trial as as_data
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.stages.learn import learn
from tests.product import tasks
from tests.product.cli.conftest import Answer, Flag, Project
from tests.product.report.page.reading import run_data
from tests.serving_trials import trial


@pytest.fixture
def compared(answer: Answer) -> Answer:
    return lambda *arguments: answer("compare", *arguments)


def test_parts_of_two_candidates_of_a_spec_add_up_to_their_steps_and_memory(
    compared: Answer, flag: Flag, project: Project
) -> None:
    arguments = ("--spec", project.spec(cluster={"memory_per_device": "2GiB"}), "tp=2, mbs=2", "DP 2, MBS 4")
    comparison = compared(*arguments)
    assert (comparison["certainty"], comparison["tasks"]) == ("predicted", [])
    assert comparison["differs"]["micro_batch_size"] == [2, 4]
    for place, side in enumerate((comparison["a"], comparison["b"])):
        step, used = side["predicted"]["step_time_s"]["value"], side["predicted"]["memory"]["device_used_gib"]
        assert sum(pair[place] for pair in comparison["time"].values()) == pytest.approx(step)
        assert sum(pair[place] for pair in comparison["memory"].values()) == pytest.approx(used, abs=0.003)
    steps = [comparison[side]["predicted"]["step_time_s"]["value"] for side in "ab"]
    assert comparison["gap"] == pytest.approx(steps[1] / steps[0] - 1)
    text = flag("compare", *arguments).out
    assert "Changed knobs: DP 1 -> 2, TP 2 -> 1, MBS 2 -> 4" in text
    assert "predicted: not both were measured" in text


def test_a_candidate_without_runs_is_compared_by_its_corrected_prediction(compared: Answer, finished: Project) -> None:
    open_one = next(
        both
        for typed in ("pp=2, mbs=2", "pp=2, mbs=1", "tp=2, mbs=1", "dp=2, mbs=2")
        if (both := compared(finished.run_dir, typed))["b"]["measured"] is None
    )
    corrected = open_one["b"]["believed"]["step_time_s"]["value"]
    assert open_one["certainty"] == "corrected"
    assert open_one["a"]["believed"] is None
    assert open_one["gap"] == pytest.approx(corrected / open_one["a"]["measured"]["step_time_s"] - 1)
    assert "(expected after trials)" in open_one["because"][0]


def test_a_stopped_candidate_keeps_its_time_and_a_plan_next_to_a_run_is_compared_as_planned(project: Project) -> None:
    plan = load_snapshot(project.spec(), None, ())
    best, slow = (plan.problem.space.candidate(int(row)) for row in rows_by_time(plan.problem)[[5, 0]])
    trials = [tasks.trial(0, best, 1.0), tasks.trial(1, slow, 3.0, state=TrialState.STOPPED)]
    run = replace(plan, search_state=learn(trials))
    first, second, planned = (
        Subject(where, columns_of(where, each)) for where, each in ((run, best), (run, slow), (plan, slow))
    )
    comparison = compare_subjects(first, second)
    assert (comparison.certainty, comparison.gap) == (CORRECTED, pytest.approx(2.0))
    assert compare_subjects(second, planned).certainty == PREDICTED


@pytest.mark.slow
def test_measured_candidates_are_distinguished_by_more_than_their_noise_or_not(
    compared: Answer, finished: Project, made_run: Path, flag: Flag, tmp_path: Path
) -> None:
    text = flag("compare", str(finished.run_dir), f"{finished.run_dir}:baseline").out
    assert "(significant: " in text
    assert "spread within a run" in text
    assert "spread between runs" in text
    comparison = compared(finished.run_dir, f"{finished.run_dir}:baseline")
    assert comparison["certainty"] == "significant"
    best, baseline = (comparison[side]["measured"]["step_time_s"] for side in "ab")
    assert comparison["gap"] == pytest.approx(baseline / best - 1)
    assert comparison["a"]["measured"]["runs"] == comparison["b"]["measured"]["runs"] == 2
    assert compared(finished.run_dir, "baseline") == comparison
    assert f"{comparison['gap']:+.1%} against the {best:.4g} s of A (measured)" in comparison["because"][0]
    rerun = compared(finished.run_dir, finished.run_dir)
    assert (rerun["gap"], rerun["certainty"], rerun["differs"]) == (0.0, "not significant", {})
    spec = yaml.safe_load((made_run.parent / "spec.yaml").read_text())
    spec["train"]["seq_length"], spec["auto_tuner"]["control"]["max_trials"] = 512, 1
    (made_run.parent / "other.yaml").write_text(yaml.safe_dump(spec))
    assert flag("tune", str(made_run.parent / "other.yaml"), "--run-dir", str(tmp_path / "other"), "-q").code == 0
    distinct = compared(f"{finished.run_dir}:baseline", tmp_path / "other")
    assert distinct["tasks"] == ["work.seq_length: 1024 -> 512"]
    assert distinct["gap"] == pytest.approx(1.0, abs=1e-6)  # half the tokens in the same time


def test_a_sure_comparison_has_no_overlapping_runs() -> None:
    faster, slower = (0.0135, 0.0239, 0.0117, 0.0110), (0.0115, 0.0381, 0.0313, 0.0255)
    assert overlap(faster, slower)
    assert overlap(slower, faster)
    assert not overlap((1.0, 1.1), (1.2, 1.5))
    assert not overlap((1.2,), (1.0, 1.1))


def test_illegal_candidate_and_unknown_run_are_reported(compared: Answer, flag: Flag, project: Project) -> None:
    comparison = compared("--spec", project.spec(), "best", "mbs=3")
    assert (comparison["gap"], comparison["certainty"], comparison["time"]) == (None, "unknown", {})
    assert comparison["because"][0].startswith("B is illegal: global_batch_size")
    completed = flag("compare", "nowhere:best", "nothing")
    assert (completed.code, completed.out) == (2, "")
    assert "nowhere:best" in completed.err


def test_candidates_without_their_run_get_the_command_to_type(flag: Flag, project: Project) -> None:
    for words in ((project.spec(), "1", "2"), (str(project.folder), "best", "baseline"), ("first",)):
        invalid = flag("compare", *words)
        assert (invalid.code, invalid.out) == (2, "")
        assert "`flag compare RUN:best RUN:baseline`" in invalid.err
        assert "`flag compare --spec SPEC 1 2`" in invalid.err


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
    limits = {"limits": snapshot.task.spec.limits, "fastest": late_trials[0].number}
    objective = {"name": snapshot.task.spec.objective}
    trials = [as_data(each) for each in late_trials]
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
