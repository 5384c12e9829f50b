"""When the page is written, from what, and what happens where that is not there. What every page has, whatever the run:
stages of a mixed cluster, the geometry of charts, and texts of others."""

import os
import re
import shutil
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from flagcore_page import page
from flagcore_page.blocks import (
    BEST,
    OTHER,
    Bar,
    Bars,
    Chart,
    Code,
    Collapsed,
    Page,
    Plot,
    Section,
    Series,
    Stack,
    Stacks,
    linear,
    render,
    spread,
)
from flagcore_page.resources import pipeline
from flagcore_page.start import log_ends, tail

from extras.page.tests.conftest import HOSTILE, KINDS, Made, Runs
from flagcore import api
from flagcore.api.commands import report
from flagcore.errors import NoDevice
from flagcore.plugins import entry_points
from flagcore.plugins.entry_points import PAGES, names
from flagcore.report.blocks import Table, Text, table
from flagcore.report.result import TrialResult
from tests.page_reading import read, run_data
from tests.product.cli.conftest import Flag, Project

Copied = Callable[..., Path]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "killed"])
@pytest.mark.costly
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
    monkeypatch.setattr(report.runs, "load_snapshot", lambda *given: pytest.fail("it was predicted again"))
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


@pytest.fixture(params=KINDS)
def made(runs: Runs, request: pytest.FixtureRequest) -> Made:
    """Each kind of run."""
    return runs(request.param)


def test_headings_and_landmarks_lead_through_the_page(made: Made) -> None:
    page = made.page
    (html,) = page.root.every("html")
    assert html.attributes["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer"):
        assert len(list(html.every(landmark))) == 1
    levels = [int(each.tag[1]) for each in html.every("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.sections[0] == "summary"
    assert all(section.attributes["aria-labelledby"] for section in html.every("section"))


def test_every_link_has_a_target_and_no_id_is_used_twice(made: Made) -> None:
    page = made.page
    places = [each.attributes["id"] for each in page.root.every() if "id" in each.attributes]
    assert len(places) == len(set(places))
    targets = [each.attributes["href"] for each in page.root.every("a")]
    assert targets
    assert {target[1:] for target in targets if target.startswith("#")} <= set(places)
    assert all((made.folder / target).exists() for target in targets if not target.startswith("#"))


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(made: Made) -> None:
    page = made.page
    assert not list(page.root.every("link", "img", "iframe", "object", "form"))
    assert not [each for each in page.root.every() if {"src", "srcset", "onclick", "onerror"} & each.attributes.keys()]
    policy = next(each.attributes["content"] for each in page.root.every("meta") if "http-equiv" in each.attributes)
    assert "default-src 'none'" in policy
    scripts = [each.text for each in page.root.every("script") if "type" not in each.attributes]
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts]
    assert re.findall(r"'sha256-[^']+'", policy) == hashes


def test_every_chart_is_described_and_has_its_figures_in_a_table(made: Made) -> None:
    page = made.page
    figures = list(page.root.every("figure"))
    assert len(figures) == len(page.charts)
    for figure in figures:
        (plot,) = [each for each in figure.every("div") if each.attributes.get("role") == "img"]
        title = next(figure.every("h3")).text
        assert title in plot.attributes["aria-label"]
        assert next(figure.every("figcaption")).text.removeprefix(title)
        assert list(next(figure.every("table")).every("td"))


def test_every_table_has_a_caption_and_headings_for_columns_and_rows(made: Made) -> None:
    for each_table in made.page.root.every("table"):
        assert next(each_table.every("caption")).text
        columns = [each for head in each_table.every("thead") for each in head.every("th")]
        assert all(each.attributes["scope"] == "col" and each.text for each in columns)
        for body in each_table.every("tbody"):
            for row in body.every("tr"):
                assert next(row.every("th")).attributes["scope"] == "row"
                assert len(list(row.every("th", "td"))) == len(columns)


def test_series_of_a_chart_differ_by_more_than_colour(made: Made) -> None:
    for chart in made.page.charts:
        for legend in chart.every("ul"):
            shapes = [next(entry.every("use", "line", "text", "rect")) for entry in legend.every("li")]
            letters = ["".join(each.text for each in entry.every("text")) for entry in legend.every("li")]
            styles = [each.attributes.get("href") or each.attributes.get("class", "") for each in shapes]
            assert len(styles) == len({*zip(styles, letters, strict=True)})


def test_the_page_is_small(made: Made) -> None:
    assert len(made.html.encode()) < 200_000


def test_each_stage_has_its_chip_and_layers(runs: Runs) -> None:
    page = runs("mixed").page
    timeline, memory = page.rows("pipeline", "Seconds per"), page.rows("memory", "Memory per device")
    assert [row["chip"].text for row in timeline] == ["old", "old", "new"]
    assert sum(row["layers"].value or 0 for row in timeline) == 4
    assert all(0 <= (row["~idle, %"].value or 0) < 1 for row in timeline)
    assert len({row["~in use"].value for row in memory}) == 3


@pytest.mark.parametrize(("schedule", "columns"), [("1f1b", 2), ("zb-h1", 3), ("dualpipe", 4)])
def test_a_pipeline_has_the_times_and_the_idle_share_of_its_stages(schedule: str, columns: int) -> None:
    passes = {"schedule": schedule, "microbatches": 4, "virtual": 1, "send_s": 0.0, "sender_waits": True}
    times = {"forward_s": [1.0, 2.0], "backward_s": [2.0, 3.0], "predicted_s": 25.0}
    times |= {} if schedule == "1f1b" else {"weight_s": [1.0, 1.0]}
    paired = {"paired_s": [2.5, 4.0]} if schedule == "dualpipe" else {}
    section = pipeline(run_data({"pipelines": [{**passes, **times, **paired}]}))
    assert section is not None
    (stages,) = section.blocks
    assert isinstance(stages, Table)
    assert schedule in stages.caption
    assert len(stages.headings) == 1 + columns + 2
    assert [row[-2].value for row in stages.rows] == [12.0, 20.0]
    assert [row[-1].value for row in stages.rows] == pytest.approx([0.52, 0.2])


@pytest.mark.parametrize(
    ("values", "from_zero", "ticks"),
    [
        ([3.0, 9.5], True, [0.0, 5.0, 10.0]),
        ([101.0, 399.0], False, [100.0, 200.0, 300.0, 400.0]),
        ([0.0001, 0.00035], False, [0.0001, 0.0002, 0.0003, 0.0004]),
        ([5.0], False, [4.5, 5.0, 5.5]),
        ([0.0, 0.0], True, [-0.1, -0.05, 0.0, 0.05, 0.1]),
    ],
)
def test_a_linear_axis_has_round_ticks_around_its_values(
    values: list[float], from_zero: bool, ticks: list[float]
) -> None:
    axis = linear("", values, from_zero=from_zero)
    assert axis.ticks == pytest.approx(ticks)
    assert (axis.place(axis.low), axis.place(axis.high)) == (0.0, 100.0)
    assert all(0.0 <= axis.place(each) <= 100.0 for each in values)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([0.03, 0.4], [0.02, 0.05, 0.1, 0.2, 0.5]), ([0.02, 100.0], [0.1, 1.0, 10.0, 100.0]), ([1e-9, 1e6], None)],
)
def test_a_wide_axis_is_logarithmic(values: list[float], ticks: list[float] | None) -> None:
    axis = spread("", values)
    assert axis.is_log
    assert len(axis.ticks) <= 6
    assert ticks is None or axis.ticks == pytest.approx(ticks)
    assert all(0.0 <= axis.place(each) <= 100.0 for each in [*values, *axis.ticks])
    assert axis.place((axis.low * axis.high) ** 0.5) == pytest.approx(50.0)


@pytest.mark.parametrize("values", [[1.0, 7.0], [0.0, 100.0], [-1.0, 100.0]])
def test_other_axes_are_linear(values: list[float]) -> None:
    assert not spread("", values).is_log


def test_points_and_steps_are_placed_from_the_top_left() -> None:
    axis = linear("", [0.0, 10.0])
    series = Series(name="", points=[(0.0, 0.0, ""), (5.0, 10.0, "")], style=0, stepped=True)
    plot = Plot(x=axis, y=axis, series=[series])
    assert plot.at(2.0, 4.0) == (20.0, 60.0)
    assert plot.steps(series) == "M0.0 100.0H50.0V0.0"


def test_bars_share_the_width_of_the_largest_value() -> None:
    bars = Bars("", [Bar("", BEST, 5.0, 4.0, 10.0), Bar("", OTHER, 2.0, 2.0, 2.0)])
    assert [bars.share(each.value) for each in bars.bars] == [50.0, 20.0]
    assert Bars("", [Bar("", BEST, 0.0, 0.0, 0.0)]).share(0.0) == 0.0
    logarithmic = Bars("", [Bar("", BEST, each, each, each) for each in (99.0, 9.0, 0.0)], is_log=True)
    assert [logarithmic.share(each.value) for each in logarithmic.bars] == [100.0, 50.0, 0.0]


@pytest.mark.parametrize(
    ("limit", "places"), [(8.0, [(0, 0.0, 12.5), (1, 12.5, 37.5)]), (None, [(0, 0.0, 20.0), (1, 20.0, 60.0)])]
)
def test_parts_of_a_stack_share_the_width_of_the_largest_sum_mark_or_limit(
    limit: float | None, places: list[tuple[int, float, float]]
) -> None:
    stack = Stack("", {"a": 1.0, "b": 3.0}, "", mark=5.0)
    drawing = Stacks(stacks=[stack], mark="", limit=None if limit is None else ("", limit))
    spans = list(drawing.spans(stack))
    assert [each[:3] for each in spans] == places
    assert spans[1][3] == "b: 75.0%"


def test_a_value_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        linear("", [0.0, 1.0]).place(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        Bars("", [Bar("", BEST, 1.0, 1.0, 1.0)]).share(float("inf"))


MALICIOUS = (
    "</script></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"' --> ]]> & a|b ``` {{ 7*7 }} <a href='#x'>"
)


def malicious_page() -> Page:
    rows = [[MALICIOUS, 1.0]]
    axis = linear(MALICIOUS, [1.0, 2.0])
    series = Series(name=MALICIOUS, points=[(1.0, 2.0, MALICIOUS)], style=0)
    charts = [
        Chart(title=MALICIOUS, summary=MALICIOUS, drawing=drawing, tables=[table(MALICIOUS, [MALICIOUS, "n"], rows)])
        for drawing in (
            Bars(MALICIOUS, [Bar(MALICIOUS, BEST, 1.0, 0.5, 2.0)]),
            Plot(x=axis, y=axis, series=[series], limits=[(MALICIOUS, 1.5)], diagonal=MALICIOUS),
            Stacks(stacks=[Stack(MALICIOUS, {MALICIOUS: 1.0}, MALICIOUS, 2.0)], mark=MALICIOUS, limit=(MALICIOUS, 3.0)),
        )
    ]
    section = Collapsed(anchor="trial-0", title=MALICIOUS, blocks=(Code(MALICIOUS, MALICIOUS), Text(MALICIOUS)))
    section = Section(
        anchor="summary",
        title=MALICIOUS,
        blocks=(Text(MALICIOUS), *charts, table(MALICIOUS, [MALICIOUS, "n"], rows), section),
    )
    return Page(title=MALICIOUS, subtitle=MALICIOUS, sections=(section,))


def test_text_of_every_kind_stays_text_in_html() -> None:
    page = read(render(malicious_page()))
    assert len(list(page.root.every("script"))) == 1
    assert not list(page.root.every("img"))
    assert all(each.text == MALICIOUS for each in page.root.every("h1", "h2", "h3", "pre"))
    assert all(each.text.startswith(MALICIOUS) for each in page.root.every("title"))
    assert not [name for each in page.root.every() for name in each.attributes if name.startswith("on")]
    assert len(page.charts) == 3


def test_a_log_with_html_is_escaped(runs: Runs) -> None:
    made = runs("failed")
    shown_words = HOSTILE.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x07", "\\u0007")
    logs = [each.text for each in made.page.section("trials").every("pre")]
    assert shown_words in logs
    assert sum("</pre><b>it is</b>" in text for text in logs) == len(made.result["trials"])
    reasons = [row["reason"].text for row in made.page.rows("summary", "Reasons")]
    assert reasons == [trial["reason"] for trial in made.result["trials"]]


def test_secrets_of_the_spec_are_left_out(runs: Runs) -> None:
    made = runs("serving")
    assert "a-secret-of-mine" in (made.folder / "spec.yaml").read_text()
    assert "a-secret-of-mine" not in made.html
    assert "HF_TOKEN" in made.html


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = tail(file, tmp_path).splitlines()
    assert lines[-1] == "line 99999"
    assert len(lines) == 25
    file.write_text("x" * 100_000)
    assert len(tail(file, tmp_path)) == 4000


def test_a_log_that_is_not_a_text_file_does_not_fail_the_trial(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", tmp_path) == ""
    os.mkfifo(tmp_path / "pipe")
    assert tail(tmp_path / "pipe", tmp_path).endswith("pipe cannot be read (it is not a regular file)")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "\x00" not in tail(tmp_path / "binary", tmp_path)


def test_a_link_out_of_the_run_is_named_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("of the reader's own")
    folder = tmp_path / "run" / "trials" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("of the trial")
    (folder / "stderr.log").symlink_to(tmp_path / "private")
    run = run_data(folder=tmp_path / "run")
    reason = "# ./trials/0/stderr.log cannot be read (it is a link to a place outside the folder)"
    logs = [("stdout.log", "of the trial"), ("stderr.log", reason)]
    assert log_ends(run, TrialResult.read({"number": 0, "candidate": {}})) == logs
