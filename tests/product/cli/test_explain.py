"""`flag explain` of one candidate: why it lost, with the numbers, and what would have to change. `flag explain` and
`compare` of servers."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from flagcore_megatron.space.knobs import BY_NAME

from flagcore import api
from flagcore.api.commands.explain import candidate_report, state_of
from flagcore.api.runs import Run, Snapshot, columns_of, load_snapshot, trial_fields
from flagcore.api.subject import Subject, allowed_rows
from flagcore.domain.space import Candidate
from flagcore.domain.trial import PROBE, RUN, Role, Trial, TrialState
from flagcore.errors import NothingFits, UsageError
from flagcore.report.result import TrialResult
from flagcore.report.text import values_text
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.stages.learn import learn
from tests.page_reading import run_data
from tests.product import tasks
from tests.product.cli.conftest import Answer, Flag, Project
from tests.serving_trials import trial


@pytest.fixture
def explained(answer: Answer) -> Answer:
    return lambda where, candidate: answer("explain", where, candidate)


def test_illegal_candidate_is_reported_with_its_rule_its_values_and_the_smallest_legal_change(
    explained: Answer, project: Project
) -> None:
    account = explained(project.spec(), "dp=2, mbs=3")
    assert account["state"] == "illegal"
    (rule,) = account["rules"]
    assert (rule["rule"], rule["values"]) == ("global_batch_size", {"data_parallel_size": 2, "micro_batch_size": 3})
    assert account["predicted"] is None
    assert account["changes"]["allowed"]["differs"] == {"micro_batch_size": [3, 2]}
    # a dense model has no experts, and asking for them is illegal
    merged_candidate = explained(project.spec(), "dp=2, ep=2")
    assert (merged_candidate["state"], merged_candidate["candidate"]["expert_model_parallel_size"]) == ("illegal", 2)
    assert merged_candidate["changes"]["allowed"]["differs"] == {"expert_model_parallel_size": [2, 1]}


def test_a_value_outside_the_space_is_reported_and_still_predicted(explained: Answer, project: Project) -> None:
    account = explained(project.spec(), "tp=2, mbs=8, sp")
    assert account["state"] == "not in the space"
    assert {line.split(":")[1].split("=")[0].strip() for line in account["because"][:2]} == {
        "micro_batch_size",
        "sequence_parallel",
    }
    assert account["predicted"]["step_time_s"]["value"] > 0
    useless = explained(project.spec(train={"attention": "flash"}), "tp=2, recompute_granularity=selective")
    assert "it would be removed: selective_recompute_with_flash_attention" in useless["because"][-1]


def test_knob_that_does_nothing_is_reported(explained: Answer, project: Project) -> None:
    account = explained(project.spec(), "tp=1, dp=2, sp=true")
    assert (account["requested"]["sequence_parallel"], account["candidate"]["sequence_parallel"]) == (True, False)
    assert explained(project.spec(), "tp=2, mbs=4")["requested"] is None


STAGES = "pp=2, layers/virtual stage=1, mbs=2"
LAYOUT = "tp=2, mbs=4, recompute full uniform 1"


@pytest.mark.parametrize(
    ("plain", "forms"),
    [
        (
            "tp=2, mbs=4",
            [
                *("TP=2,micro_batch_size=4", "TP2, MBS4", "tp 2, mbs 4", "no dist-opt, TP2, MBS4"),
                *("tp = 2, mbs = 4", "tp=2，mbs=4", "ＴＰ２, ＭＢＳ４", "TP 2, MBS 4, no method"),
            ],
        ),
        (LAYOUT, ["TP2, MBS4, recompute=full uniform 1"]),
        (STAGES, ["PP2, layers/virtual stage 1, MBS2"]),
    ],
)
def test_a_candidate_may_be_typed_in_many_forms(project: Project, plain: str, forms: list[str]) -> None:
    space = {"num_layers_per_virtual_pipeline_stage": [None, 1]}
    snapshot = load_snapshot(project.spec(model={"num_layers": 4}, auto_tuner={"space": space}), None, ())
    candidate = candidate_report(snapshot, plain).candidate
    assert candidate["num_layers_per_virtual_pipeline_stage"] == (1 if plain == STAGES else None)
    for typed in forms:
        assert candidate_report(snapshot, typed).candidate == candidate


def test_knobs_may_be_arguments_of_their_own(flag: Flag, project: Project) -> None:
    spec = project.spec()
    assert flag("explain", spec, "tp=2", "mbs=4").out == flag("explain", spec, "tp=2, mbs=4").out
    assert flag("explain", spec, "BEST").out == flag("explain", spec, "best").out
    assert flag("explain", spec, "Baseline").out == flag("explain", spec, "baseline").out


def test_a_model_and_devices_of_the_command_line_are_explained(answer: Answer, flag: Flag) -> None:
    words = ("explain", "--model", "Qwen/Qwen3-0.6B", "--engine", "vllm", "--chip", "H100-SXM")
    assert answer(*words, "--devices", "1", "tp=2")["state"] == "illegal"
    assert answer(*words, "--devices", "2", "tp=2")["candidate"]["tensor_model_parallel_size"] == 2
    flag("explain").refused(2, "--model")


def test_the_only_value_of_a_knob_is_not_set_without_effect(explained: Answer, project: Project) -> None:
    space = {"recompute_granularity": ["selective", "full"], "recompute_method": "uniform", "recompute_num_layers": 1}
    spec = project.spec(train={"attention": "flash"}, auto_tuner={"space": {**space, "use_recompute": [True, False]}})
    selective = explained(spec, "tp=2, mbs=4, recompute selective")
    assert selective["state"] == "removed"
    assert selective["because"][0].startswith("selective_recompute_with_flash_attention")
    illegal = explained(spec, "tp=2, mbs=3")
    assert illegal["state"] == "illegal"
    assert illegal["changes"]["allowed"]["differs"].keys() == {"micro_batch_size"}
    assert explained(spec, "tp=2, mbs=4, recompute full")["candidate"]["recompute_method"] == "uniform"


def test_memory_that_a_candidate_lacks_is_reported_by_parts_that_add_up(explained: Answer, project: Project) -> None:
    account = explained(project.spec(cluster={"memory_per_device": "400MiB"}), "dp=2, mbs=4")
    assert account["state"] == "removed"
    (line,) = account["because"]
    memory = account["predicted"]["memory"]
    assert line.startswith(f"does_not_fit: needs {memory['device_used_gib']:.2f} / {memory['capacity_gib']:.2f} GiB")
    parts = [float(part.rpartition(" ")[2]) for part in line.partition("stage 0: ")[2].split(", ")]
    assert sum(parts) == pytest.approx(memory["device_used_gib"], abs=0.005 * len(parts))
    assert account["changes"]["allowed"]["predicted"]["memory"]["fits"]


def test_if_nothing_fits_no_change_is_suggested(explained: Answer, flag: Flag, project: Project) -> None:
    spec = project.spec(cluster={"memory_per_device": "100MiB"})
    account = explained(spec, "tp=2, mbs=1")
    assert (account["state"], account["changes"]) == ("removed", {})
    assert account["because"][0].startswith("does_not_fit: ")
    best = flag("explain", spec, "best")
    assert (best.code, best.out) == (3, "")


@pytest.mark.costly
def test_listed_candidates_are_named_by_all_their_knobs_or_by_some_as_the_fastest_with_them(
    explained: Answer, flag: Flag, project: Project
) -> None:
    space = {"use_recompute": [True, False], "sequence_parallel": [True, False], "use_distributed_optimizer": [True]}
    spec = project.spec(auto_tuner={"space": {**space, "micro_batch_size": [1, 2]}})
    listing = json.loads(flag("estimate", spec, "--json", "--all", "--top", "40").out)
    assert any(each["candidate"]["use_recompute"] for each in listing)
    for each in listing[:: len(listing) // 4]:
        fastest = explained(spec, values_text(each["candidate"], BY_NAME))
        assert fastest["predicted"]["step_time_s"]["value"] <= each["step_time_s"]["value"]
        account = explained(spec, ", ".join(f"{name}={value}" for name, value in each["candidate"].items()))
        assert account["candidate"] == each["candidate"]
        assert f"number {each['number']:,} of" in account["because"][0]
    assert explained(spec, "1")["candidate"] == listing[0]["candidate"]


def test_an_ambiguous_candidate_is_refused_with_the_available_knobs(flag: Flag, project: Project) -> None:
    snapshot = load_snapshot(project.spec(), None, ())
    for wrong, named in {
        "tp=x": "tensor_model_parallel_size",
        "microbatch=2": "'micro_batch_size'?",
        "tp=0": "tensor_model_parallel_size = 0",
        "sp=3": "sequence_parallel = 3",
        "tp=1,TP=2": "tensor_model_parallel_size",
        "0": "1 to 7",
        "recompute full uniform 1 2": "recompute_num_layers",
        "tp": "tensor_model_parallel_size",
        "x" * 999: "x" * 40 + "'",
        "TP2 quick": "quick",
        "candidate": "'candidate'",
        " , ": "data_parallel_size (DP)",
    }.items():
        with pytest.raises(UsageError, match=re.escape(named)) as refused:
            candidate_report(snapshot, wrong)
        assert len(str(refused.value)) < 700
    completed = flag("explain", project.spec(), "tp=x").refused(2, "tensor_model_parallel_size")
    assert completed.err.startswith("flag: ")
    assert completed.err.count("\n") == 1


@pytest.mark.slow
def test_trials_of_a_run_are_listed_next_to_the_best(explained: Answer, flag: Flag, finished: Project) -> None:
    best = explained(finished.run_dir, "best")
    number = finished.result()["best"]["number"]
    step = f"{finished.result()['best']['measured']['step_time_s']['median']:.4g} s/step"
    assert best["state"] == "ran"
    repeats = [line for line in best["because"] if f"(repeat) measured: {step}" in line]
    first, *middle, last = best["because"]
    assert first.startswith(f"trial {number} (search) measured: {step}; answers: ")
    assert middle == repeats
    assert f" {1 + len(repeats)} runs: {step}" in last
    assert repeats
    assert best["known_s"] == pytest.approx(finished.result()["best"]["measured"]["step_time_s"]["median"])
    assert explained(finished.run_dir, f"trial {number}")["candidate"] == best["candidate"]
    baseline = explained(finished.run_dir, "baseline")
    assert baseline["candidate"] == finished.result()["baseline"]["candidate"]
    assert baseline["changes"]["fastest"]["trial"] == number
    tried_candidates = {json.dumps(each["candidate"]) for each in finished.result()["trials"]}
    other_trials = json.loads(flag("estimate", finished.spec(control={"max_trials": 5}), "--all", "--json").out)
    untried = next(each["candidate"] for each in other_trials if json.dumps(each["candidate"]) not in tried_candidates)
    open_one = explained(finished.run_dir, values_text(untried, BY_NAME))
    assert "max_trials = 5" in open_one["because"][0]
    assert open_one["believed"]["step_time_s"]["value"] < open_one["predicted"]["step_time_s"]["value"]
    assert flag("explain", str(finished.run_dir), "99").err.endswith(": 0, 1, 2, 3, 4, 5, 6\n")


@pytest.mark.slow
def test_a_run_from_before_a_knob_existed_is_explained(explained: Answer, flag: Flag, finished: Project) -> None:
    journal = finished.run_dir / "journal.log"
    text = journal.read_text(encoding="utf-8")
    without = re.sub('"use_distributed_optimizer":(true|false),', "", text)
    assert without != text
    journal.write_text(without, encoding="utf-8")
    best = explained(finished.run_dir, "best")
    assert best["state"] == "ran"
    assert best["candidate"]["use_distributed_optimizer"] is False


@pytest.mark.slow
def test_one_candidate_has_no_csv_and_a_run_rejects_another_chip(flag: Flag, finished: Project) -> None:
    assert "--format csv" in flag("explain", finished.spec(), "best", "--format", "csv").err
    flag("explain", str(finished.run_dir), "best", "--chip", "cpu").refused(2, "--chip cpu")
    assert flag("explain", str(finished.folder), "best").code == 2


def test_a_run_is_reported_with_its_own_chip(explained: Answer, flag: Flag, project: Project) -> None:
    spec = project.spec(cluster={"chip": "H100-SXM", "devices_per_node": 2, "memory_per_device": "4GiB"})
    assert flag(*("tune", spec, "--run-dir", str(project.run_dir), "--fidelity", "estimate", "-q")).code == 0
    saved = Path(project.run_dir, "spec.yaml")
    data = yaml.safe_load(saved.read_text())
    data["cluster"] = {"memory_per_device": "4GiB"}  # as if its spec had left the chip to discovery
    report_before = explained(project.run_dir, "best")
    saved.write_text(yaml.safe_dump(data))
    report_after = explained(project.run_dir, "best")
    assert (report_after["chip"], report_after["devices"]) == ("H100-SXM", 2)
    assert report_after["predicted"] == report_before["predicted"]


def test_a_stopped_trial_is_not_predicted_faster_than_measured(project: Project) -> None:
    snapshot = load_snapshot(project.spec(), None, ())
    first, other = _candidates(snapshot, 0, 1)
    slow_s = 1.01 * float(snapshot.problem.predictions.step_time_s[snapshot.problem.space.find(other)])
    learned = snapshot._replace(search_state=learn((tasks.trial(2, first, slow_s, state=TrialState.STOPPED),)))
    slowest = values_text(_candidates(snapshot, -1)[0].as_dict(), BY_NAME)
    assert candidate_report(snapshot, slowest).changes["fastest"].candidate == first.as_dict()
    assert candidate_report(learned, slowest).changes["fastest"].candidate != first.as_dict()
    assert "fastest" not in candidate_report(learned, "2").changes
    assert candidate_report(learned, "1").known_s == slow_s


def test_a_slower_candidate_is_reported_with_the_best_figure_that_it_is_compared_with(project: Project) -> None:
    snapshot = load_snapshot(project.spec(), None, ())
    best, slow = _candidates(snapshot, 0, 5)
    ended = "clearly slower than the best: by far"
    trials = [
        tasks.trial(1, best, 1.0),
        tasks.trial(2, slow, 3.0, state=TrialState.STOPPED, reason=ended),
        tasks.trial(3, best, 0.5, role=Role.REPEAT),
    ]
    lines = [_explained(snapshot, some, slow)[1][0] for some in (trials[1:2], trials[:2], trials)]
    assert all(line.startswith("trial 2 (search) stopped: 3 s/step") for line in lines)
    assert all(line.endswith(ended) for line in lines)
    _single, beside_one, beside_two = lines
    assert "+200.0%" in beside_one
    assert "trial 1: 1 s/step)" in beside_one
    assert "+300.0%" in beside_two
    assert "trial 1: 0.75 s/step, median of 2 runs" in beside_two


def test_a_candidate_that_may_be_as_fast_is_reported(project: Project) -> None:
    snapshot = load_snapshot(project.spec(), None, ())
    candidates = _candidates(snapshot, 0, 3, 5)
    trials = [tasks.trial(*each) for each in zip((1, 2, 3), candidates, (1.0, 1.03, 3.0), strict=True)]
    repeated = [*trials, tasks.trial(4, candidates[0], 1.05, role=Role.REPEAT)]
    lines = [_explained(snapshot, repeated, each)[1] for each in candidates]
    assert [any("not significantly slower" in line for line in each) for each in lines] == [False, True, False]
    assert len(_explained(snapshot, trials, candidates[1])[1]) == 1


def test_probed_candidates_are_reported_as_probed(project: Project) -> None:
    snapshot = load_snapshot(project.spec(), None, ())
    best, slow = _candidates(snapshot, 0, 1)
    probes = [replace(tasks.trial(number, each, number), fidelity=PROBE) for number, each in ((1, best), (2, slow))]
    state, (ended,) = _explained(snapshot, probes, best, PROBE)
    assert (state, ended) == ("ran", "probe 1 (search) measured: 1 s/step; it is the best")
    line = "probe 2 (search) measured: 2 s/step, +100.0% in time vs the best (trial 1: 1 s/step)"
    assert _explained(snapshot, probes, slow, PROBE) == ("ran", [line])


def _candidates(snapshot: Snapshot, *places: int) -> list[Candidate]:
    """Return the candidates at places in the order of predicted time."""
    return [snapshot.problem.space.candidate(int(row)) for row in rows_by_time(snapshot.problem)[list(places)]]


def _explained(
    snapshot: Snapshot, trials: list[Trial], candidate: Candidate, fidelity: str = RUN
) -> tuple[str, list[str]]:
    """Return the state of a candidate after trials, with the reasons."""
    run = Run(folder=Path("run"), spec={}, data={}, fidelity=fidelity, **trial_fields(trials, fidelity, ""))
    learned = snapshot._replace(search_state=run.search_state, run=run)
    return state_of(Subject(learned, columns_of(learned, candidate)))[:2]


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
    assert "output tok/s (80% of predictions: " in explanation
    assert "  p50 TTFT " in explanation
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
    learned_snapshot = snapshot._replace(search_state=learn(late_trials), run=run)
    with pytest.raises(NothingFits, match="p99 TTFT <= 5 s"):
        candidate_report(learned_snapshot, "best")
    assert not allowed_rows(learned_snapshot).size
    saved = [*late_trials[:-1], replace(trial(len(late_trials) - 1, 1.0), candidate=late_trials[-1].candidate)]
    assert allowed_rows(learned_snapshot._replace(search_state=learn(saved))).tolist() == [len(late_trials) - 1]


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
    assert other.known_s >= (report.known_s or 0.0)
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
