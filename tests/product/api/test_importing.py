"""FlagScale's history.csv as trials of a run, and how a tune goes on from them."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flagcore_importers.history import import_history

import flagcore
from flagcore.domain.trial import Role, TrialState
from flagcore.errors import RunError, UsageError
from flagcore.tuner.experience import Experience
from tests.checks import given
from tests.product.cli.conftest import Project
from tests.product.cli.test_explain import SPEC as SERVE_SPEC

KNOBS = {
    **dict.fromkeys(("data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
    **dict.fromkeys(("context_parallel_size", "expert_model_parallel_size", "micro_batch_size"), 1),
    **dict.fromkeys(("use_distributed_optimizer", "sequence_parallel", "use_recompute"), False),
    **dict.fromkeys(("recompute_method", "recompute_granularity", "recompute_num_layers"), None),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), None),
    **dict.fromkeys(("num_layers_per_virtual_pipeline_stage", "performance", "error"), None),
    "acc_step": 8,
    "elapsed_time": 12.5,
    "start_time": "2025-11-20 10:00:00",
    "max_mem": 300.0,
}
"""The columns of a training history."""
TP2 = {"tensor_model_parallel_size": 2}
ROWS = [
    {"idx": 3, **TP2, "micro_batch_size": 2, "performance": 90.0},
    {"idx": 1, **TP2, "micro_batch_size": 1, "performance": 150.0},
    {"idx": 2, "data_parallel_size": 2, "micro_batch_size": 4, "max_mem": "OOM", "error": "CUDA error: out of memory"},
    {"idx": 4, **TP2, "micro_batch_size": 4, "error": "RuntimeError: NCCL timed out"},
]


def history(file: Path, rows: list[dict[str, Any]], columns: dict[str, Any] = KNOBS) -> Path:
    """Write rows as FlagScale does: sorted best first, None as nothing."""
    names = ["idx", *columns, *dict.fromkeys(name for row in rows for name in row if name not in ("idx", *columns))]
    with file.open("w", newline="") as stream:
        table = csv.DictWriter(stream, names, escapechar="\\")
        table.writeheader()
        table.writerows({**columns, **row} for row in rows)
    return file


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def importing(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))

    def call(rows: list[dict[str, Any]], **options: Any) -> Any:
        return import_history(
            history(tmp_path / "history.csv", rows), tmp_path / "spec.yaml", run_dir=project.run_dir, **options
        )

    return call


def test_rows_become_finished_trials_in_the_order_in_which_they_ran(
    importing: Callable[..., Any], project: Project, tmp_path: Path
) -> None:
    project.spec()
    result = importing(ROWS, same_machine=True)
    states = [TrialState.MEASURED, TrialState.OUT_OF_MEMORY, TrialState.MEASURED, TrialState.FAILED]
    assert [trial.state for trial in result.trials] == states
    assert {trial.source for trial in result.trials} == {str(tmp_path / "history.csv")}
    assert result.trials[3].reason == "RuntimeError: NCCL timed out"
    measurement = result.trials[2].measurement
    assert measurement.step_time_s == 0.09
    assert measurement.tokens_per_second_per_device == pytest.approx(8 * 1024 / 0.09 / 2)
    assert (measurement.peak_reserved_bytes, measurement.device_used_bytes) == (300 * 2**20, None)
    assert result.notes == ()
    run = flagcore.load_run(project.run_dir)
    assert run.imported == run.trials == result.trials
    assert run.best == result.trials[2]
    assert run.baseline is None


def test_tune_uses_rows_of_the_same_machine_but_reports_only_its_own_gain(
    importing: Callable[..., Any], project: Project
) -> None:
    spec = project.spec(control={"max_trials": 2, "repeats": 1})
    importing(ROWS, same_machine=True)
    outcome = flagcore.tune(spec, run_dir=project.run_dir)
    plan = outcome.plan
    own_trials = [trial for trial in plan.trials if not trial.source]
    assert [trial.role for trial in own_trials] == [Role.BASELINE, Role.SEARCH]
    assert {trial.number for trial in plan.trials if trial.source} == {0, 1, 2, 3}
    assert plan.counts.balanced
    assert plan.best is not None
    assert plan.best.number == 2  # 0.09 s was imported, but it ran again
    assert [trial.candidate for trial in plan.repeats].count(plan.best.candidate) >= 1
    assert plan.gain == pytest.approx(0.1975 / 0.1025 - 1)  # not what 90 ms would give
    assert "imported best" in str(outcome)
    assert outcome.data["best"]["source"].endswith("history.csv")


def test_rows_of_another_machine_are_experience_only(importing: Callable[..., Any], project: Project) -> None:
    spec = project.spec(control={"max_trials": 3})
    assert {trial.role for trial in importing(ROWS).trials} == {Role.IMPORTED}
    (file,) = Experience.of_user().folder.glob("*.jsonl")
    assert [json.loads(line)["measured"]["step_time_s"] for line in file.read_text().splitlines()] == [0.15, 0.09]
    plan = flagcore.tune(spec, run_dir=project.run_dir).plan
    assert [trial.source for trial in plan.trials] == [None] * 3
    assert given(given(plan.best).measurement).step_time_s > 0.1
    run = flagcore.load_run(project.run_dir)
    assert (len(run.imported), len(run.trials)) == (4, 3)
    account = flagcore.explain_candidate(project.run_dir, "2")
    assert account.candidate["micro_batch_size"] == 2
    assert "trial 2 (imported) measured: 0.09 s/step, on another machine" in account.because[0]


def test_rows_that_cannot_be_taken_are_reported_with_their_lines(
    importing: Callable[..., Any], project: Project, tmp_path: Path
) -> None:
    project.spec()
    wrong_rows = [
        {"idx": 5, **TP2, "micro_batch_size": 8, "performance": 1.0},
        {"idx": 6, "data_parallel_size": 2, "micro_batch_size": 3, "performance": 1.0},
        {"idx": 7, **TP2, "performance": 1.0, "decoder_first_pipeline_num_layers": 3},
        {"idx": 8, **TP2, "micro_batch_size": 1, "performance": 1.0, "speed": "warp"},
        {"idx": 9, **TP2, "micro_batch_size": 0, "performance": 1.0},
        {"idx": 10, **TP2, "recompute_method": "thrice", "performance": 1.0},
    ]
    result = importing([*ROWS, *wrong_rows], same_machine=True)
    assert len(result.trials) == 4
    unknown, *reported = result.notes
    assert unknown.endswith(": speed")
    reasons = [
        "not in the space",
        "global_batch_size",
        "layers of the first and the last stage",
        "line 3",
        "not a valid size",
        "valid value",
    ]
    assert len(reported) == len(reasons)
    for line, (note, message) in enumerate(zip(reported, reasons, strict=True), start=6):
        assert note.startswith(f"line {line} ")
        assert message in note
    with pytest.raises(RunError, match="already contains the trials of"):
        importing(ROWS)
    distant_history = history(tmp_path / "far.csv", [{"idx": 1, **TP2, "performance": 90_000.0}])
    (note,) = import_history(distant_history, tmp_path / "spec.yaml", run_dir=tmp_path / "far").notes
    assert float(re.findall(r"[\d.]+", note)[0]) > 20  # measured over predicted


def test_a_file_that_is_not_a_history_is_refused(
    importing: Callable[..., Any], project: Project, tmp_path: Path
) -> None:
    spec = project.spec()
    for text, message in {
        "": "is empty",
        "a,b\n1,2\n": "is not a history of FlagScale",
        "idx,ttft,itl\n1,2,3\n": "wrong.csv: serving; ",
        "idx,performance\n": "no row of",
        "idx;performance\n1;2\n": "idx;performance",
        "idx,performance,idx\n1,2,3\n": "columns: idx; keep one",
        "\x00,\x1b[2J\n1,2\n": "\ufffd, '\\x1b[2J'...",
    }.items():
        (tmp_path / "wrong.csv").write_text(text)
        with pytest.raises(UsageError, match=re.escape(message)):
            import_history(tmp_path / "wrong.csv", spec, run_dir=tmp_path / "never")
    with pytest.raises(UsageError, match="cannot be read"):
        import_history(tmp_path / "nothing.csv", spec)
    assert not (tmp_path / "never").exists()


NAMES = "idx,tensor_model_parallel_size,data_parallel_size,micro_batch_size,"
NAMES += "pipeline_model_parallel_size,max_mem,performance"
UNUSUAL = {
    "BOM": ("\ufeff" + NAMES, "1,2,1,1,1,300.0,150.0", "measured"),
    "blank lines": ("\n\n" + NAMES + "\n,,,,,,", "1,2,1,1,1,300.0,150.0", "measured"),
    "None": (NAMES + ",decoder_first_pipeline_num_layers", "1,2,1,1,None,N/A,150.0,None", "measured"),
    "OOM": (NAMES, "1,2,1,1,1,oom,None", "out_of_memory"),
    "no phrase": (NAMES + ",error", "1,2,1,1,1,,,torch.OutOfMemoryError", "out_of_memory"),
    "long error": (NAMES + ",error", "1,2,1,1,1,,," + "Error: " * 30_000, "failed"),
    "quoted list": (NAMES + ",gpu_utilization", '1,2,1,1,1,300.0,150.0,"[0.2, 0.8]"', "measured"),
    "bare list": (NAMES + ",gpu_utilization", "1,2,1,1,1,300.0,150.0,[0.2, 0.8]", "it has 9 cells"),
    "short": (NAMES, "1,2,1,1", "it has 4 cells"),
    "unit": (NAMES, "1,2,1,1,1,300.0,150 ms", "performance = '150 ms'"),
    "thousands": (NAMES, '1,2,1,1,1,"1,300.0",150', "max_mem = '1,300.0'"),
    "below zero": (NAMES, "1,2,1,1,1,300.0,-1", "performance = -1"),
    "pruned": (NAMES + ",pruned", "1,2,1,1,1,300.0,150.0,True", "FlagScale pruned it"),
    "huge": (NAMES, "1,2,1,1e300,1,300.0,150.0", "micro_batch_size = '1e300'"),
    "list of knob": (NAMES, '1,2,1,"[1, 2]",1,300.0,150.0', r"micro_batch_size = '\[1, 2\]'"),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_an_unusual_row_is_read_or_left_out_with_the_reason(
    case: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    heading, row, message = UNUSUAL[case]
    file, spec = tmp_path / "odd.csv", project.spec()
    file.write_text(f"{heading}\n{row}\n", encoding="utf-8")
    if message in {state.value for state in TrialState}:
        (trial,) = import_history(file, spec, run_dir=project.run_dir).trials
        assert trial.state.value == message
        assert trial.candidate.as_dict()["tensor_model_parallel_size"] == 2
    else:
        with pytest.raises(UsageError, match=f"line 2 .*: {message}"):
            import_history(file, spec, run_dir=project.run_dir)


def test_columns_missing_in_a_file_are_reported_with_their_defaults(project: Project, tmp_path: Path) -> None:
    file = tmp_path / "few.csv"
    file.write_text("idx,tensor_model_parallel_size,performance,stopped_by_tuner\n1,2,150.0,True\n")
    result = import_history(file, project.spec(), run_dir=project.run_dir, same_machine=True)
    assert "data_parallel_size, pipeline_model_parallel_size" in result.notes[0]
    assert "micro_batch_size" in result.notes[0]
    measurement = result.trials[0].measurement
    assert given(measurement).partial


SERVED = {
    "threads": None,
    "n_gpu_layers": 0,
    "split_mode": "layer",
    "engine": "llama_cpp",
    "elapsed_time": 30.0,
    "start_time": "",
}


def test_server_rows_are_imported_without_figures_that_flagscale_repeats(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    tuner = {"objective": "itl_s", "space": {"threads": [1, 2, 4], "n_gpu_layers": [0]}}
    spec = {**SERVE_SPEC, "auto_tuner": tuner}
    figures = {"e2e_latency": 800.0, "request_throughput": 5.0, "token_throughput": 240.0, "ttft": 90.0, "itl": 40.0}
    rows = [
        {"idx": 1, "threads": 1, **figures, "topt": 41.0},
        {"idx": 2, "threads": 2, **figures, "topt": 41.0},
        {"idx": 3, "threads": 4, **figures, "itl": 35.0, "topt": 36.0, "engine": "vllm"},
    ]
    file = history(tmp_path / "served.csv", rows, SERVED)
    result = import_history(file, spec, run_dir=project.run_dir, same_machine=True)
    first, second = result.trials
    assert first.measurement is not None
    assert first.measurement.step_time_s == first.measurement.figures["itl_s.mean"] == 0.04
    assert first.measurement.figures["total_tokens_per_s"] == 240.0
    assert first.measurement.figures["output_tokens_per_s"] == 80.0  # each of 5 requests a second had 32 tokens
    assert second.state is TrialState.FAILED
    assert "line 2" in str(second.reason)
    (other_engine,) = (note for note in result.notes if "vllm" in note)
    assert other_engine.startswith("line 4 ")
    assert "llamacpp" in other_engine
