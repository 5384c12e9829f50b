"""What a trial left in its folder and its logs becomes a measurement, or an error that says what went wrong first.
Trials of servers on several hosts, and of an instance that prefills and one that decodes: real processes."""

import dataclasses
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_serving.engine import ServingEngine
from flagcore_serving.job import Load
from flagcore_serving.launch.server import Instance, TrialJob, log_name
from flagcore_serving.load.routing import P2P
from flagcore_serving.trial import failures
from flagcore_serving.trial.__main__ import run
from flagcore_serving.trial.failures import PATTERNS, TrialFailure, first_error, log_text, server_failure
from flagcore_serving.trial.reading import NoMetrics, acceptance, with_measured_acceptance
from flagcore_serving.trial.servers import listeners
from flagcore_sglang.engine import ENGINE as SGLANG
from flagcore_vendorkit.metrics import METRICS
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines.tasks import serving, space_of
from engines.serving.tests.trial import trials
from engines.serving.tests.trial.test_misbehaving_servers import all_gone
from engines.serving.tests.trial.trials import SERVER, requests_sent
from flagcore.contracts import Platform, Problem
from flagcore.domain.launch import LONGEST_REASON, Exit, FailurePattern, classify
from flagcore.domain.metrics import HighestLoad
from flagcore.domain.space import Candidate
from flagcore.domain.spec import ClusterSpec, Task
from flagcore.domain.trial import Measurement, Role, TimeLimit, Trial, TrialState
from flagcore.tuner.problem import with_learned
from flagcore.tuner.stages.build import legality
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure
from flagcore.tuner.stages.predict import predict
from flagcore.tuner.stages.prune import prune
from tests.product import tasks
from tests.serving_trials import trial


def task(objective: str = "output_tokens_per_s", highest: str | None = None, **slo: float) -> Task:
    slo = {name.replace("__", "."): limit for name, limit in slo.items()}
    return serving("llamacpp", slo=slo, highest=highest, objective=objective)


def point(concurrency: int, *repeats: dict[str, float]) -> dict[str, Any]:
    filled = [{"total_tokens_per_s": 2 * each["output_tokens_per_s"], **each} for each in repeats]
    return {
        "load": {"concurrency": concurrency, "input_len": 8, "request_rate": None},
        "repeats": [{"figures": each} for each in filled],
    }


def rate(tokens: float, ttft: float = 0.1) -> dict[str, float]:
    return {"output_tokens_per_s": tokens, "ttft_s.p99": ttft, "ttft_s.mean": ttft / 2}


def read(folder: Path, where: Task, *points: dict[str, Any], **changes: Any) -> Measurement:
    knobs = {name: changes.pop(name) for name in ("instances",) if name in changes}
    data = {"points": points, "effective": {}, "versions": {}, "counters": {}, "startup_s": [1.0], **changes}
    (folder / "metrics.json").write_text(json.dumps(data))
    return LLAMACPP.read(where, Candidate.of({**LLAMACPP.defaults(where), **knobs}), str(folder))


def test_a_figure_is_the_median_of_its_repeats_and_they_are_the_steps(tmp_path: Path) -> None:
    found = read(tmp_path, task(), point(4, rate(100), rate(400), rate(200)))
    assert found.figures["output_tokens_per_s"] == 200
    assert found.step_times_s == (1 / 100, 1 / 400, 1 / 200)
    assert found.step_time_s == 1 / 200
    assert 0 < found.spread_s < 1 / 100


def test_the_best_load_point_that_keeps_the_slo_is_reported(tmp_path: Path) -> None:
    points = point(1, rate(50)), point(8, rate(90)), point(64, rate(200, ttft=9.0))
    found = read(tmp_path, task(ttft_s__p99=1.0), *points)
    assert (found.figures["output_tokens_per_s"], found.broken) == (90, ())
    assert [each["output_tokens_per_s"] for each in found.points] == [50, 90, 200]
    assert read(tmp_path, task(), *points).figures["output_tokens_per_s"] == 200


def test_the_highest_load_of_a_search_is_a_figure(tmp_path: Path) -> None:
    where = task(highest="concurrency", ttft_s__p99=1.0)
    assert read(tmp_path, where, point(8, rate(90)), point(9, rate(95, ttft=2.0))).figures["highest_load"] == 8
    highest = {"met": 8.0, "exceeded": None, "untested": 9.0}
    assert read(tmp_path, where, point(8, rate(90)), highest=highest).highest == HighestLoad(met=8.0, untested=9.0)


def test_notes_of_the_load_are_kept_and_the_uncertainty_of_one_that_ended_early_is_its_spread(tmp_path: Path) -> None:
    noted = point(4, rate(100), rate(100))
    for repeat in noted["repeats"]:
        repeat |= {"notes": ["the client was busy"], "error": 0.2}
    found = read(tmp_path, task(), noted)
    assert found.notes == ("the client was busy",)
    assert found.spread_s == pytest.approx(0.2 / 100)


@pytest.mark.parametrize(
    ("objective", "figures", "problem"),
    [
        ("tpot_s.mean", rate(100) | {"tpot_s.mean": 0.0}, "tpot_s.mean is 0"),  # the tokens were read together
        ("output_tokens_per_s", rate(0.0), "not a positive number"),
    ],
)
def test_a_figure_of_zero_is_not_a_measurement(
    objective: str, figures: dict[str, float], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(NoMetrics, match=problem):
        read(tmp_path, task(objective), point(8, figures))


def test_if_no_load_point_meets_the_slo_the_nearest_is_reported_with_its_broken_limits(tmp_path: Path) -> None:
    found = read(tmp_path, task(ttft_s__p99=1.0), point(8, rate(90, ttft=1.5)), point(64, rate(200, ttft=9.0)))
    assert found.figures["output_tokens_per_s"] == 90
    assert found.broken == ("ttft_s.p99 is 1.5 s, over 1 s",)


def test_a_limit_on_an_unmeasured_figure_is_broken(tmp_path: Path) -> None:
    assert read(tmp_path, task(itl_s__p99=1.0), point(8, rate(90))).broken == ("itl_s.p99 is not measured, over 1 s",)


def test_counters_and_startup_time_are_stored_with_the_figures(tmp_path: Path) -> None:
    found = read(tmp_path, task(), point(8, rate(90)), counters={"preemptions": 3}, startup_s=[2.0, 5.0])
    assert (found.figures["preemptions"], found.figures["startup_s"]) == (3, 5)


def test_an_engine_default_is_not_treated_as_a_requested_value(tmp_path: Path) -> None:
    found = read(tmp_path, task(), point(8, rate(90)), effective={"parallel": 4, "enable_prefix_caching": True})
    assert found.effective == {"parallel (the engine's own choice)": 4, "enable_prefix_caching": True}


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"points": []}', '{"points": [{"load": {}, "repeats": []}]}'])
def test_invalid_metrics_are_reported(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(NoMetrics, match=r"metrics\.json"):
        LLAMACPP.read(task(), Candidate.of(LLAMACPP.defaults(task())), str(tmp_path))


def on_cores(**arguments: Any) -> Task:
    return serving("llamacpp", devices=4, on_cores=True, objective="output_tokens_per_s", **arguments)


def test_memory_in_use_on_cores_is_a_cores_share_of_the_fullest_instance(tmp_path: Path) -> None:
    figures = {"resident_bytes": [8000, 6000]}
    assert read(tmp_path, on_cores(), point(4, rate(100)), **figures, instances=2).device_used_bytes == 4000
    assert read(tmp_path, on_cores(), point(4, rate(100)), resident_bytes=[0]).device_used_bytes is None
    assert read(tmp_path, task(), point(4, rate(100)), **figures, instances=2).device_used_bytes is None


def test_a_plugins_knob_among_the_engines_knobs_is_ignored(tmp_path: Path) -> None:
    read(tmp_path, on_cores(), point(4, rate(100)))
    candidate = Candidate.of({**LLAMACPP.defaults(on_cores()), "a_vendors_knob": "on"})
    assert LLAMACPP.read(on_cores(), candidate, str(tmp_path)).figures["output_tokens_per_s"] == 100


def test_memory_is_of_the_fullest_device_and_tokens_are_of_all(tmp_path: Path) -> None:
    reported = [{"weights_gib": 4.0, "kv_cache_tokens": 100.0}, {"weights_gib": 6.0, "kv_cache_tokens": 200.0}]
    found = read(tmp_path, task(), point(4, rate(100)), memory=reported, instances=2)
    assert (found.figures["weights_gib"], found.figures["kv_cache_tokens"]) == (6.0, 300.0)
    shared = read(tmp_path, on_cores(), point(4, rate(100)), memory=reported, instances=2)
    assert (shared.figures["weights_gib"], shared.figures["kv_cache_tokens"]) == (3.0, 300.0)


def test_a_latency_is_reported_at_its_worst_load(tmp_path: Path) -> None:
    points = point(1, rate(50, ttft=0.2)), point(8, rate(90, ttft=0.9)), point(64, rate(200, ttft=0.6))
    found = read(tmp_path, task("ttft_s.p99", ttft_s__p99=1.0), *points)
    assert (found.figures["ttft_s.p99"], found.step_time_s, found.broken) == (0.9, 0.9, ())
    for repeat in (repeat for each in points for repeat in each["repeats"]):
        repeat["figures"]["tpot_s.mean"] = 0.01
    over = read(tmp_path, task("tpot_s", ttft_s__p99=0.5), *points)
    assert over.figures["ttft_s.p99"] == 0.9
    assert over.broken


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("INFO: fine\nTypeError: a\nValueError: b\n", "TypeError: a"),
        ("error: no such flag\nValueError: b\n", "ValueError: b"),
        ("ready\nfatal: it broke\nbye\n", "fatal: it broke"),
        ("WARNING: TypeError: harmless\nready\nbye\n", "bye"),
        ("(EngineCore pid=7) WARNING 11-25 04:00:00 [cuda.py:88] RuntimeError: no NVML\nready\nbye\n", "bye"),
        ("ImportError: x, falling back to y\nValueError: b\nbye\n", "ValueError: b"),
        ("", ""),
    ],
)
def test_without_a_pattern_the_reason_is_an_exception_or_an_error_or_the_last_line(log: str, line: str) -> None:
    assert first_error(log, ()) == (None, line)
    if "WARNING" in log:
        assert first_error(log, VLLM.reports.failures) == (None, line)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [VLLM, SGLANG, LLAMACPP])
@pytest.mark.parametrize("line", ["x" * 2000, "a." * 1000])
def test_long_single_word_lines_are_searched(engine: ServingEngine, line: str) -> None:
    log = f"{line}\n" * 500 + "ValueError: at last"
    assert first_error(log, engine.reports.failures)[1] == "ValueError: at last"


def test_out_of_memory_is_classified_before_its_consequences() -> None:
    patterns = (
        FailurePattern(pattern="ValueError", state=TrialState.INVALID),
        FailurePattern(pattern="out of memory", state=TrialState.OUT_OF_MEMORY, advice="use less"),
    )
    assert first_error("ValueError: x\nCUDA out of memory", patterns) == (
        TrialState.OUT_OF_MEMORY,
        "CUDA out of memory (use less)",
    )


def test_the_beginning_and_end_of_a_long_log_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "HEAD_BYTES", 20)
    monkeypatch.setattr(failures, "TAIL_BYTES", 10)
    (tmp_path / "log").write_text("first line" + "x" * 100 + "\nlast line")
    text = log_text(tmp_path / "log")
    assert text.startswith("first line")
    assert text.endswith("last line")
    assert len(text) == 31
    assert log_text(tmp_path / "none") == ""


def test_a_server_crash_under_load_is_reported_with_its_error_and_no_harmless_lines(tmp_path: Path) -> None:
    begun = "ImportError: fast_kernels is not there\nready\n"
    (tmp_path / "log").write_text(begun + "slot 3 is free\nbus error in worker 1\nslot 4 is free\n")
    assert "its log: bus error in worker 1" in str(
        server_failure("instance 0", "ended", tmp_path / "log", (), len(begun))
    )
    (tmp_path / "log").write_text("listening\nerrors are ignored\nPOST /v1/completions 200\n")
    reported = str(server_failure("instance 0", "ended with signal 11", tmp_path / "log", ()))
    assert "its log names no error, and ends: POST /v1/completions 200" in reported


def test_a_server_that_the_system_killed_was_probably_too_large(tmp_path: Path) -> None:
    assert server_failure("instance 0", "ended with signal 9", tmp_path / "log", ()).state is TrialState.OUT_OF_MEMORY
    assert server_failure("instance 0", "ended with signal 11", tmp_path / "log", ()).state is TrialState.FAILED


@pytest.mark.parametrize("state", failures.PREFIXES)
def test_final_messages_of_the_program_are_classified(state: TrialState) -> None:
    line = str(TrialFailure(state, "it\nsaid " + "much " * 200))
    found, reason = classify(Exit(code=1, ended_by=None, duration_s=1.0), f"load 1 of 1\n{line}\n", PATTERNS)
    assert (found, reason) == (state, line.removeprefix(f"{state.value.replace('_', ' ')}: "))
    assert len(line) <= LONGEST_REASON


def measured(tokens: float | None, **values: object) -> Trial:
    """A trial with a mean number of tokens per iteration."""
    found = trial(1, 100.0)
    assert found.measurement is not None
    figures = {**found.measurement.figures, **({} if tokens is None else {"drafted_share": 1.0 - 1.0 / tokens})}
    candidate = type(found.candidate).of({"speculation": "ngram", "speculative_tokens": 3, **values})
    return replace(found, candidate=candidate, measurement=replace(found.measurement, figures=figures))


def learned_from(trials: list[Trial]) -> Task:
    return with_measured_acceptance(serving("vllm"), trials, {"ngram": "ngram", "mtp": "mtp"})


@pytest.mark.parametrize(("probability", "drafted"), [(0.0, 3), (0.7, 1), (0.7, 4), (1.0, 5)])
def test_the_acceptance_follows_from_the_tokens_of_an_iteration(probability: float, drafted: int) -> None:
    tokens = 1.0 + sum(probability**each for each in range(1, drafted + 1))
    assert acceptance(tokens, drafted) == pytest.approx(probability, abs=1e-6)


def test_iterations_without_drafts_count() -> None:
    found = measured(1.5)
    assert found.measurement is not None
    figures = {**found.measurement.figures, "acceptance_rate": 0.9}
    often = replace(found, measurement=replace(found.measurement, figures=figures))
    assert learned_from([often]) == learned_from([found])
    reported = replace(found, measurement=replace(found.measurement, figures={"tokens_per_iteration": 1.5}))
    assert learned_from([reported]) == learned_from([found])


def test_the_median_of_trials_replaces_the_value_of_the_spec() -> None:
    task = serving("vllm")
    assert learned_from([measured(None), measured(1.5, speculative_tokens=None)]) == task
    (load,) = learned_from([measured(1.1), measured(1.8, speculative_tokens=1), measured(4.0)]).spec.serve.loads
    assert load.accepted("ngram") == pytest.approx((0.8,))
    assert load.accepted("mtp") is None


def test_rates_by_position_are_kept_for_drafts_of_each_iteration() -> None:
    found = measured(2.0, speculation="mtp", speculative_tokens=2)
    assert found.measurement is not None
    rates = {**found.measurement.figures, "acceptance_at_1": 0.8, "acceptance_at_2": 0.3}
    found = replace(found, measurement=replace(found.measurement, figures=rates))
    (load,) = learned_from([found, measured(1.5)]).spec.serve.loads
    assert load.accepted("mtp") == pytest.approx((0.8, 0.3))
    assert load.accepted("ngram") == pytest.approx((acceptance(1.5, 3),), abs=0.01)


def test_predictions_of_other_candidates_with_speculation_change() -> None:
    space = {"speculation": [None, "ngram"], "speculative_tokens": [2, 3], "max_num_seqs": [64]}
    task = serving("vllm", devices=1, space=space)
    platform, found = tasks.platform(task), space_of(VLLM, task)
    legal = legality(platform)
    predictions = predict(platform, found)
    pruned, first = prune(found, predictions, ()), found.candidate(0)
    problem = Problem(
        platform=platform, legality=legal, space=found, predictions=predictions, pruned=pruned, baseline=first
    )
    learned = with_learned(problem, [measured(3.5)])
    drafts = problem.space.columns(np.arange(len(found)))["speculation"] > 0
    before, after = problem.predictions.step_time_s, learned.predictions.step_time_s
    assert (after[drafts] < 0.8 * before[drafts]).all()
    assert (after[~drafts] == before[~drafts]).all()
    assert with_learned(learned, [measured(3.5)]) is learned


LOAD = Load(input_len=16, output_len=8, num_prompts=8, concurrency=4)
ENGINE = "flagcore_llamacpp.reports:REPORTS"


def job(folder: Path, behaviour: str) -> TrialJob:
    """A job with one instance of each kind; the one that decodes has `behaviour`."""
    instances = [
        Instance(argv=(sys.executable, str(SERVER), each, "--port", "{port}", "--parallel", "4"), kind=kind)
        for kind, each in (("prefill", "good"), ("decode", behaviour))
    ]
    return TrialJob(
        engine=ENGINE,
        instances=tuple(instances),
        loads=(LOAD,),
        vocab_size=100,
        timeout_s=60.0,
        directory=str(folder),
        protocol=P2P,
    )


@pytest.mark.slow
def test_each_request_passes_both_instances_and_all_processes_end(tmp_path: Path) -> None:
    run(job(tmp_path, "good"), tmp_path)
    (point,) = json.loads((tmp_path / METRICS).read_text())["points"]
    assert point["repeats"][0]["completed"] == LOAD.num_prompts
    ports = Counter(each["port"] for each in requests_sent(tmp_path))
    assert len(ports) == 2
    assert len(set(ports.values())) == 1
    assert all(listeners(port) == [] for port in ports)


@pytest.mark.slow
def test_a_dead_instance_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrialFailure) as caught:
        run(job(tmp_path, "dies"), tmp_path)
    assert caught.value.state is TrialState.FAILED
    assert "instance 1" in str(caught.value)


HOSTS = ("127.0.0.1", "localhost")
"""Names at which the servers of this machine answer."""


def on_hosts(folder: Path, behaviour: str, **arguments: Any) -> Platform:
    """The platform of two hosts with two cores each."""
    cluster = ClusterSpec(hosts=HOSTS, nodes=2, devices_per_node=2)
    return trials.platform(folder, behaviour, nodes=2, cluster=cluster, launcher="shell", **arguments)


def run_on_hosts(platform: Platform, folder: Path, **values: int) -> Trial:
    """Run a candidate by agents of this machine, as the loop does."""
    launcher = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])
    candidate, trial_folder = trials.candidate(platform, **values), str(trials.trial_folder(folder))
    trial = Trial(number=0, candidate=candidate, role=Role.SEARCH, state=TrialState.RUNNING)
    running = launch(platform, launcher, candidate, trial_folder, TimeLimit(seconds=60.0, because="test"))
    return measure(running, platform, trial, trial_folder, None)


@pytest.mark.costly
def test_instances_on_two_hosts_answer_one_client(tmp_path: Path) -> None:
    done = run_on_hosts(on_hosts(tmp_path, "good"), tmp_path, instances=3, parallel=4)
    assert done.state is TrialState.MEASURED, done.reason
    assert done.measurement is not None
    assert done.measurement.figures["output_tokens_per_s_per_device"] == pytest.approx(
        done.measurement.figures["output_tokens_per_s"] / 3
    )
    assert len({each["port"] for each in trials.requests_sent(tmp_path)}) == 3
    folders = [tmp_path / "trial", tmp_path / "trial" / "hosts" / HOSTS[1]]
    assert [[(folder / log_name(number)).exists() for number in range(3)] for folder in folders] == [
        [True, True, False],
        [False, False, True],
    ]
    assert (done.measurement.device_used_bytes or 0) > 0
    assert all_gone(tmp_path)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("behaviour", "state", "reason"),
    [
        ("out_of_memory", TrialState.OUT_OF_MEMORY, "cudaMalloc failed: out of memory"),
        ("dies", TrialState.FAILED, "exit code 3; its log: RuntimeError: the engine exploded"),
    ],
)
def test_a_failure_on_a_host_has_its_class_and_its_reason(
    behaviour: str, state: TrialState, reason: str, tmp_path: Path
) -> None:
    loads = (dataclasses.replace(trials.LOAD, num_prompts=24),)
    done = run_on_hosts(on_hosts(tmp_path, behaviour, loads=loads), tmp_path, instances=2, parallel=4)
    assert (done.state, done.measurement) == (state, None)
    assert reason in (done.reason or "")
    assert all_gone(tmp_path)
