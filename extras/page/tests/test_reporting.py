"""When the page is written, from what, and what happens where that is not there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from flagcore_page import page

from extras.page.tests.conftest import KINDS, Runs
from flagcore import api
from flagcore.api.commands import report
from flagcore.errors import NoDevice
from flagcore.plugins import entry_points
from flagcore.plugins.entry_points import PAGES, names
from tests.page_reading import read
from tests.product.cli.conftest import Flag, Project

Copied = Callable[..., Path]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "killed"])
def test_tune_writes_the_same_page_as_the_report_command(runs: Runs, kind: str) -> None:
    report = runs(kind)
    assert (report.folder / "report.html").read_text() == report.html


@pytest.mark.parametrize("kind", ["dense", "failed"])
def test_the_stop_reason_is_in_the_language_of_the_reader(runs: Runs, kind: str) -> None:
    reason = runs(kind).result["stopped_because"]
    assert reason in runs(kind).page.section("summary").text
    assert reason not in read(runs.chinese(kind)).section("summary").text


def test_failures_that_differ_in_digits_are_counted_together(runs: Runs) -> None:
    reasons = {trial["reason"] for trial in runs("failed").result["trials"]}
    assert f"{len(reasons)} of {len(reasons)} trials" in runs("failed").page.section("summary").text


@pytest.mark.parametrize("kind", ["pipeline", "serving"])
def test_the_page_needs_neither_plugins_nor_predictions(runs: Runs, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load_snapshot", lambda *given: pytest.fail("it was predicted again"))
    assert api.report(runs(kind).folder) == runs(kind).html


def test_without_its_predictions_the_rest_of_a_run_is_reported(copied: Copied) -> None:
    folder = copied("pipeline")
    (folder / "insight.json").unlink()
    page = read(api.report(folder, without=["cpu"]))
    assert "Details of predictions are omitted" in page.section("summary").text
    assert page.facts("summary")["Speedup over the baseline"].value is not None
    assert page.rows("memory", "Memory")


@pytest.mark.parametrize("text", ["{", '{"schema_version": 99}'])
def test_an_unusable_insight_file_is_ignored(copied: Copied, text: str) -> None:
    folder = copied("dense")
    (folder / "insight.json").write_text(text)
    assert "Details of predictions are omitted" in read(api.report(folder)).section("summary").text


def test_a_killed_run_is_reported_by_its_journal(runs: Runs) -> None:
    report = runs("killed")
    assert "in progress, or was killed" in report.page.section("summary").text
    assert len(report.page.rows("trials", "All trials")) == 2
    assert not (report.folder / "result.json").exists()


def test_trials_that_ended_after_the_result_are_reported(copied: Copied, runs: Runs) -> None:
    folder = copied("resumed")
    shutil.copy(runs("interrupted").folder / "result.json", folder)
    page = read(api.report(folder))
    assert "in progress, or was killed" in page.section("summary").text
    finished = runs("resumed").result
    assert len(page.rows("trials", "All trials")) == len(finished["trials"]) + len(finished["repeats"])
    assert page.facts("summary")["Speedup over the baseline"].value == finished["gain"]
    explained = api.explain(folder)
    assert (explained.counts.measured, explained.ended_because) == (finished["counts"]["measured"], None)
    assert api.load_run(folder).stopped_because is None
    assert api.load_run(runs("resumed").folder).stopped_because == finished["stopped_because"]


def test_a_run_without_any_trial_is_reported(copied: Copied) -> None:
    folder = copied("killed")
    (folder / "journal.log").unlink()
    page = read(api.report(folder))
    assert "No trial has finished" in page.section("summary").text
    assert "No trial has finished" in page.section("trials").text


def test_a_failed_report_page_does_not_lose_the_run(
    tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: object) -> str:
        raise ZeroDivisionError("of the page")

    monkeypatch.setattr(page, "as_html", broken)
    outcome = api.tune(project.spec(control={"max_trials": 2, "repeats": 0}), run_dir=tmp_path / "run")
    assert not outcome.reported
    assert outcome.plan.best is not None
    assert (tmp_path / "run" / "result.json").exists()
    assert "report.html was not written (ZeroDivisionError: of the page)" in caplog.text


def test_without_the_page_a_run_ends_well_and_the_report_names_what_to_install(
    tmp_path: Path, project: Project, flag: Flag, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry_points, "names", lambda group: () if group == PAGES else names(group))
    outcome = api.tune(project.spec(control={"max_trials": 2, "repeats": 0}), run_dir=tmp_path / "run")
    assert not outcome.reported
    assert (tmp_path / "run" / "insight.json").exists()
    assert "install flagcore-page" in caplog.text
    completed = flag("report", str(tmp_path / "run"))
    assert completed.code == NoDevice.exit_code
    assert completed.err == "flag: the page of a run cannot be written; install flagcore-page\n"


def test_a_plan_has_the_same_page(flag: Flag, project: Project, tmp_path: Path) -> None:
    command = ("estimate", project.spec(), "--top", "2")
    completed = flag(*command, "--report", str(tmp_path / "plan.html"))
    assert (completed.code, completed.out) == (0, flag(*command).out)
    page = read((tmp_path / "plan.html").read_text())
    assert {"summary", "step", "memory", "funnel", "improvements", "trials"} <= set(page.sections)
    assert page.facts("summary")["Speed"].text.startswith("~")
    assert "flag tune spec.yaml" in [each.text for each in page.section("summary").every("code")]
    assert str(tmp_path) not in page.root.text
    assert flag(*command, "--report", "page.html", "--explain", "1").code == 2


def test_a_folder_without_a_run_is_one_line(flag: Flag, tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "none"):
        completed = flag("report", str(where))
        assert completed.code == 2
        assert completed.err.startswith("flag: ")
        assert len(completed.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_command_writes_into_the_run_to_stdout_or_to_a_file(
    flag: Flag, copied: Copied, runs: Runs, tmp_path: Path
) -> None:
    folder = copied("dense")
    (folder / "report.html").unlink()
    completed = flag("report", str(folder))
    assert (completed.code, completed.out.strip()) == (0, str(folder / "report.html"))
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    folder = runs("dense").folder
    completed = flag("report", str(folder), "--output", "page.html")
    assert completed.out.strip() == "page.html"
    assert (tmp_path / "page.html").read_text() == runs("dense").html == flag("report", str(folder), "-o", "-").out
    assert flag("report", str(folder), "-o", "no/such/folder.html").code == 2


def test_flags_are_listed_only_if_they_set_all_knobs(copied: Copied, runs: Runs) -> None:
    assert "--parallel" in runs("serving").html
    assert "Flags of the engine" in runs("serving").html
    other = {"kv_cache_type": "q8_0"}  # two flags, which the knob does not name
    folder = copied("serving", lambda data: data["best"]["candidate"].update(other))
    assert "Flags of the engine" not in api.report(folder)
