"""`flag compare`: two candidates part by part, and whether their difference is more than noise. Whatever is wrong with
the input: the exit code that is promised, one clear message, no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore.api.commands.compare import compare_subjects, overlap
from flagcore.api.runs import columns_of, load_snapshot
from flagcore.api.subject import Subject
from flagcore.domain.trial import TrialState
from flagcore.report.candidate_report import CORRECTED, PREDICTED
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.stages.learn import learn
from tests.product import tasks
from tests.product.cli.conftest import Answer, Flag, Project, Ran
from tests.product.cli.test_estimate import JOB
from tests.product.tasks import SHAPE


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
    run = plan._replace(search_state=learn(trials))
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
    assert distinct["tasks"] == ["train.seq_length: 1024 -> 512"]
    assert distinct["gap"] == pytest.approx(1.0, abs=1e-6)  # half the tokens in the same time


def test_illegal_candidate_and_unknown_run_are_reported(compared: Answer, flag: Flag, project: Project) -> None:
    comparison = compared("--spec", project.spec(), "best", "mbs=3")
    assert (comparison["gap"], comparison["certainty"], comparison["time"]) == (None, "unknown", {})
    assert comparison["because"][0].startswith("B is illegal: global_batch_size")
    flag("compare", "nowhere:best", "nothing").refused(2, "nowhere:best")


def test_candidates_without_their_run_get_the_command_to_type(flag: Flag, project: Project) -> None:
    for words in ((project.spec(), "1", "2"), (str(project.folder), "best", "baseline"), ("first",)):
        flag("compare", *words).refused(2, "`flag compare RUN:best RUN:baseline`", "`flag compare --spec SPEC 1 2`")


def refused(ran: Ran, code: int, *words: str) -> None:
    """Assert one line on stderr with all of `words`, nothing on stdout, and the exit code."""
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    (line,) = ran.err.strip().splitlines()
    assert line.startswith("flag: ")
    assert len(line) < 6000
    for word in words:
        assert word in line


def test_a_file_that_is_not_a_spec(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_bytes(bytes(range(256)))  # tests/spec has other contents
    for command in ("tune", "estimate", "explain"):
        refused(flag(command, str(tmp_path / "spec.yaml")), 2, "not UTF-8", "spec.yaml")
    assert os.listdir(tmp_path) == ["spec.yaml"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    refused(flag("estimate", str(tmp_path / "config.json")), 2, "--model")


@pytest.mark.parametrize(
    ("tuner", "code", "words"),  # tests/spec has other errors of code 2
    [
        (
            {"baseline": {"tensor_model_parallel_size": 3, "data_parallel_size": 3}},
            2,
            ("attention_heads", "devices", "tensor_model_parallel_size = 3", "remove auto_tuner.baseline, or set its"),
        ),
        ({"space": {"meshes": ["cpu dp2"]}}, 2, ("auto_tuner.space.meshes",)),
        ({"space": {"tensor_model_parallel_size": 3}}, 3, ("no legal candidate", "attention_heads")),
    ],
)
def test_an_invalid_spec(
    tuner: dict[str, Any], code: int, words: tuple[str, ...], flag: Flag, project: Project
) -> None:
    spec = project.spec(auto_tuner=tuner)
    for command in ("estimate", "tune"):
        refused(flag(command, spec), code, *words)
    assert not (project.folder / "runs").exists()


@pytest.mark.parametrize("make", [Path.exists, os.mkdir, os.mkfifo])
def test_a_path_that_is_not_a_file(make: Callable[[Path], object], flag: Flag, tmp_path: Path) -> None:
    make(tmp_path / "path")
    for command in (("estimate",), ("tune",), ("run",), *([("estimate", "--jobs")] if make != os.mkfifo else [])):
        refused(flag(*command, str(tmp_path / "path")), 2)


@pytest.mark.parametrize("content", ["", "{}", '{"argv": [], "environment": {}, "directory": "/"}'])
def test_a_run_with_a_modified_best(content: str, flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "launch.json").write_text(content)
    refused(flag("run", str(tmp_path)), 2)


def test_wrong_usage_shows_the_usage(flag: Flag) -> None:
    for arguments in (
        ("tune",),
        ("estimate", "a.yaml", "--top", "0"),
        ("estimate", "a.yaml", "--jobs", "b.jsonl"),
        ("tune", "a.yaml", "--nosuch"),
        ("plugins", "x"),
    ):
        assert flag(*arguments).refused(2).err.startswith("Usage: flag")


RECORDS: dict[str, tuple[Any, str]] = {
    "an id that is no number": ('{"id": NaN}', "invalid"),
    "an id of half a character": ({**JOB, "id": "\ud800"}, "invalid"),
    "uneven nodes": ({**JOB, "cluster": {"chip": "cpu", "devices": 3, "devices_per_node": 2}}, "invalid"),
    "long": (json.dumps({**JOB, "note": "x" * (5 << 20)}), "ok"),
    "huge sizes": (
        {
            **JOB,
            "candidate": {},
            "model": {**SHAPE, "hidden_size": 2**30, "ffn_hidden_size": 2**31, "num_layers": 1_000},
            "train": {"seq_length": 2**31, "global_batch_size": 2**31, "precision": "fp32"},
        },
        "ok",
    ),
}


def test_each_bad_job_record_is_reported(flag: Flag, tmp_path: Path) -> None:
    lines = [record if isinstance(record, str) else json.dumps(record) for record, _ in RECORDS.values()]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines) + "\n")
    completed = flag("estimate", "--jobs", str(tmp_path / "jobs.jsonl"), "--format", "jsonl").worked()
    answers = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in completed.out.splitlines()]
    assert [answer["status"] for answer in answers] == [status for _, status in RECORDS.values()]
    assert all(len(answer.get("reason", "")) < 500 for answer in answers)
    assert all("\n" not in answer.get("reason", "") for answer in answers)
    assert "Traceback" not in completed.err


def test_a_sure_comparison_has_no_overlapping_runs() -> None:
    faster, slower = (0.0135, 0.0239, 0.0117, 0.0110), (0.0115, 0.0381, 0.0313, 0.0255)
    assert overlap(faster, slower)
    assert overlap(slower, faster)
    assert not overlap((1.0, 1.1), (1.2, 1.5))
    assert not overlap((1.2,), (1.0, 1.1))
