"""What the page tells is what result.json says, unrounded behind each figure."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flagcore_page.page import MOST_LISTED

from extras.page.tests.conftest import FINISHED, KINDS, SERVED, Runs
from flagcore import api
from flagcore.domain.plan import Counts, Speedup
from flagcore.report.formats import shown, size_text
from flagcore.spec.plain_data import lookup
from tests.page_reading import Read, read

Edited = Callable[..., Read]
STEP = "measured.step_time_s.median"
SPEED = "measured.tokens_per_second_per_device"
MEASURED = tuple(kind for kind in FINISHED if kind != "estimate")


@pytest.mark.parametrize("kind", FINISHED)
def test_the_answer_contains_the_best_and_its_gain(runs: Runs, kind: str) -> None:
    report = runs(kind)
    best, facts = report.result["best"], report.page.facts("summary")
    speedup = report.result["speedup"]
    assert facts["Speedup over the baseline"].value == speedup["value"] == report.result["gain"]
    if kind == "estimate":
        reported = best["predicted"]["tokens_per_second_per_device"]["value"]
    else:
        runs_of_best = next(each for each in report.result["runs"] if best["number"] in each["counted"])
        reported = runs_of_best["output_tokens_per_s" if kind in SERVED else "tokens_per_second_per_device"]
    assert facts["Speed"].value == pytest.approx(reported, rel=1e-12)
    assert shown(reported) in facts["Speed"].text


@pytest.mark.parametrize(
    ("gain", "rounds", "text"),
    [
        (0.5, [0.375, 0.5, 0.625], "+50.0% tokens/s (3 rounds: +37.5% to +62.5%)"),
        (
            0.125,
            [0.125, -0.041, 0.25],
            "not conclusive, rounds differ by more than the gain (3 rounds: -4.1% to +25.0%)",
        ),
        (-0.041, [-0.041], "no significant gain (-4.1% tokens/s)"),
    ],
)
def test_the_headline_is_the_gain_with_the_range_of_its_rounds(
    edited: Edited, gain: float, rounds: list[float], text: str
) -> None:
    speedup = asdict(Speedup.of(gain, rounds))
    facts = edited("dense", lambda data: data.update(speedup=speedup)).facts("summary")
    assert facts["Speedup over the baseline"].text.startswith(text)


def test_a_plan_is_not_compared_with_a_baseline_that_does_not_fit(edited: Edited) -> None:
    def crowded(data: dict[str, Any]) -> None:
        for baseline in (data["baseline"], data["trials"][0]):
            baseline["predicted"]["memory"]["fits"] = False
        data["speedup"] = None

    page = edited("estimate", crowded)
    assert page.facts("summary")["Speedup over the baseline"].value is None
    assert "Why" not in page.section("summary").text
    assert "(over its limit: memory)" in page.section("summary").text
    assert not any("vs base" in row for row in page.rows("trials", "All candidates"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "killed"])
def test_the_counts_on_the_page_add_up(runs: Runs, kind: str) -> None:
    report = runs(kind)
    counts = report.result["counts"]
    assert Counts(**counts).balanced
    rows = {row["stage"].text: row for row in report.page.rows("funnel", "Search space")}
    totals = ("combinations", "candidates", "untried")
    assert [rows[name]["number"].value for name in totals] == [counts[name] for name in totals]
    values, places = [row["number"].value or 0.0 for row in rows.values()], [*map([*rows].index, totals)]
    assert all(sum(values[start:end]) == values[end] for start, end in pairwise(places))
    assert all(rows[f"illegal: {rule}"]["number"].value == -count for rule, count in counts["illegal"].items())
    assert all(rows[f"pruned: {rule}"]["number"].value == -count for rule, count in counts["pruned"].items())
    assert all(row["why"].text != "-" for name, row in rows.items() if name.startswith("illegal: "))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "killed"])
def test_every_trial_is_in_the_table_with_its_figures(runs: Runs, kind: str) -> None:
    report = runs(kind)
    all_trials = [trial for name in ("probes", "trials", "repeats") for trial in report.result[name]]
    rows = {int(next(iter(row.values())).value or 0): row for row in report.page.rows("trials", "All ")}
    assert sorted(rows) == sorted(trial["number"] for trial in all_trials)
    columns = {
        "step s": STEP,
        "spread": "measured.step_time_s.spread",
        "~step s": "predicted.step_time_s.value",
        "~GiB": "predicted.memory.device_used_gib",
        "TTFT p99 s": "measured.figures.ttft_s.p99",
        "TPOT p50 s": "measured.figures.tpot_s.p50",
    }
    for trial in all_trials:
        row = rows[trial["number"]]
        assert row["state"].text == trial["state"].replace("_", " ")
        speed = "predicted.tokens_per_second_per_device.value" if trial["state"] == "predicted" else SPEED
        columns |= {"tok/s/dev": speed}
        headings_seen = [heading for heading in columns if heading in row]
        assert len(headings_seen) >= 1
        assert all(row[heading].value == lookup(trial, columns[heading]) for heading in headings_seen)


@pytest.mark.parametrize("kind", MEASURED)
def test_predicted_against_measured_has_each_trial_with_its_interval(runs: Runs, kind: str) -> None:
    report = runs(kind)
    rows = report.page.rows("accuracy", "Measured and predicted")
    measured_trials = [trial for trial in report.result["trials"] if trial["measured"]]
    assert [int(row["trial"].value or 0) for row in rows] == [trial["number"] for trial in measured_trials]
    key = "objective" if kind in SERVED else "step_time_s"
    for row, trial in zip(rows, measured_trials, strict=True):
        bounds = trial["predicted"][key]
        assert [row[name].value for name in ("~predicted", "~low", "~high")] == [
            bounds[name] for name in ("value", "low", "high")
        ]
        inside = bounds["low"] <= (row["measured"].value or 0.0) <= bounds["high"]
        assert row["80% interval"].text == ("inside" if inside else "outside")


@pytest.mark.parametrize("kind", MEASURED)
def test_the_best_so_far_only_gets_better_and_ends_at_the_best_first_run(runs: Runs, kind: str) -> None:
    report = runs(kind)
    rows = report.page.rows("progress", "Trials that were the best so far")
    heading, in_table = ("output tok/s", "output tok/s") if kind in SERVED else ("tokens/s/device", "tok/s/dev")
    best = [row[heading].value or 0.0 for row in rows]
    assert best == sorted(set(best))
    first = {trial["number"] for trial in report.result["trials"]}
    table = report.page.rows("trials", "All trials")
    assert best[-1] == max(row[in_table].value or 0.0 for row in table if int(row["trial"].value or 0) in first)
    spent_s = sum(trial["duration_s"] for name in ("trials", "repeats") for trial in report.result[name])
    assert 0 < (rows[-1]["elapsed, s"].value or 0.0) <= spent_s


@pytest.mark.parametrize("kind", ["dense", "pipeline", "experts", "estimate"])
def test_parts_of_a_step_add_up_to_it(runs: Runs, kind: str) -> None:
    report = runs(kind)
    rows = report.page.rows("step", "Parts of the step time")
    prediction = report.result["best"]["predicted"]
    best = "~recommended, s" if kind == "estimate" else "~best, s"
    parts = [row[best].value or 0.0 for row in rows if row["part"].text not in ("predicted", "measured")]
    assert sorted(parts) == sorted(prediction["time"].values())
    assert sum(parts) == pytest.approx(prediction["step_time_s"]["value"])


@pytest.mark.parametrize("kind", ["dense", "pipeline", "experts", "estimate"])
def test_memory_of_the_worst_stage_matches_the_prediction(runs: Runs, kind: str) -> None:
    report = runs(kind)
    memory = report.result["best"]["predicted"]["memory"]
    stages = report.page.rows("memory", "Memory")
    worst = stages[memory["worst_stage"]]
    assert worst["~peak allocated"].value == pytest.approx(memory["peak_allocated_gib"])
    assert worst["~in use"].value == pytest.approx(memory["device_used_gib"])
    headings = list(worst)
    parts = headings[headings.index("stage") + 1 : headings.index("~peak allocated")]
    groups = [worst[name].value or 0.0 for name in parts]
    assert {"~weights", "~activations", "~context and libraries"} <= {*parts}
    assert sum(groups) == pytest.approx(memory["device_used_gib"], rel=1e-3)
    assert len(stages) == report.result["best"]["candidate"]["pipeline_model_parallel_size"]
    assert (worst["capacity"].value, worst["~reserved"].value) == (memory["capacity_gib"], memory["reserved_gib"])


def test_no_load_point_is_better_than_one_of_the_pareto_front(runs: Runs) -> None:
    report = runs("serving")
    rows = report.page.rows("serving", "Load points by output tok/s/dev and p50 TPOT")
    points = [(row["output tok/s/dev"].value or 0.0, -(row["p50 TPOT, s"].value or 0.0)) for row in rows]
    better = [any(each != own and each[0] >= own[0] and each[1] >= own[1] for each in points) for own in points]
    assert [row["Pareto-optimal"].text for row in rows] == ["no" if each else "yes" for each in better]
    (limited,) = [chart for chart in report.page.charts if "p99 TTFT, s" in [each.text for each in chart.every("p")]]
    (limit,) = [each for each in limited.every("line") if list(each.every("title"))]
    assert limit.text == f"limit {report.result['limits']['ttft_s.p99']:g} s"
    assert limit.attributes["class"] == "limit"
    assert limit.attributes["x1"] == limit.attributes["x2"] != "0.0%"
    names, shapes = zip(
        *((each.text.strip(), next(each.every("line", "use"))) for each in limited.every("li")), strict=True
    )
    assert dict(zip(names, shapes, strict=True))[limit.text].attributes["class"] == "limit"
    assert len(names) == len(set(names)) > 1
    points = [each for each in limited.every("use") if list(each.every("title"))]
    assert {point.text.split("\n")[0].split(":")[0] for point in points} == {
        f"trial {trial['number']}" for trial in report.result["trials"] if trial["measured"]
    }


def test_latencies_are_reported_by_their_statistics(runs: Runs) -> None:
    report = runs("serving")
    best = report.result["best"]["measured"]["points"][0]
    for name, latency in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        row = report.page.rows("serving", f"{name} of requests")[0]
        assert {each: row[each].value for each in best[latency]} == best[latency]
        assert row["requests"].value == best["answered"]


def test_if_no_trial_meets_the_limits_the_nearest_is_reported(runs: Runs, edited: Edited) -> None:
    def late(data: dict[str, Any]) -> None:
        data |= {"best": None, "gain": None, "speedup": None, "limits": {"ttft_s.p99": 1e-6}}
        for trial in data["trials"]:
            trial["measured"]["broken"] = ["ttft_s.p99 is over 1e-06 s"]

    trials = runs("serving").result["trials"]
    nearest = min(trials, key=lambda trial: trial["measured"]["figures"]["ttft_s"]["p99"])["number"]
    page = edited("serving", late)
    assert f"nearest: trial {nearest} (" in page.section("summary").text
    assert "flag tune SPEC --run-dir . --new" in [each.text for each in page.section("summary").every("code")]
    row = page.rows("serving", "TTFT of requests")[0]
    assert (row["load point"].text.split(",")[0], row["trial"].value) == ("nearest", nearest)


def test_differences_of_measured_parts_are_named(runs: Runs, copied: Callable[..., Path]) -> None:
    folder, parts = copied("dense"), {"baseline": (0.15, 0.05), "best": (0.08, 0.02)}
    for name, (forward_backward_s, optimizer_s) in parts.items():
        steps = [{"forward_backward_s": forward_backward_s, "optimizer_s": optimizer_s}] * 3
        trial = folder / "trials" / str(runs("dense").result[name]["number"])
        (trial / "metrics.json").write_text(json.dumps({"steps": steps}))
    page = read(api.report(folder))
    assert re.search(r": forward and backward -0\.07 s, optimizer -0\.03 s", page.section("summary").text)
    rows = page.rows("step", "Seconds that the trial program measured")
    assert {row["trial"].text: (row["forward and backward"].value, row["optimizer"].value) for row in rows} == parts


@pytest.mark.parametrize(
    ("kind", "option"),
    [("failed", " --new"), ("interrupted", ""), ("killed", ""), ("estimate", " --fidelity run"), ("dense", None)],
)
def test_the_summary_ends_with_the_next_command(runs: Runs, kind: str, option: str | None) -> None:
    codes = [each.text for each in runs(kind).page.section("summary").every("code")]
    commands = [each.removeprefix("flag tune SPEC --run-dir .") for each in codes if each.startswith("flag tune")]
    assert commands == ([] if option is None else [option])


def test_chip_facts_have_their_sources(runs: Runs) -> None:
    rows = runs("dense").page.rows("chips", "1 x 2 cpu")
    assert len(rows) > 3
    assert all(row["kind of source"].text != "-" and row["source"].text for row in rows[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_figure_is_its_rounded_value(runs: Runs, kind: str) -> None:
    for element in runs(kind).page.root.every("td", "th", "dd"):
        number_match = re.fullmatch(r"~?(-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?)", element.text)
        if element.value is not None and number_match:
            assert float(number_match[1].replace(",", "")) == pytest.approx(element.value, rel=6e-4, abs=0.0)


def test_engines_are_reported_side_by_side_with_links_to_their_own_pages(runs: Runs) -> None:
    report = runs("engines")
    rows = {row["engine"].text: row for row in report.page.rows("summary", "Tuned engines")}
    assert list(rows) == list(report.result["engines"])
    assert rows["llamacpp"]["output tok/s"].value == pytest.approx(
        report.result["best"]["measured"]["figures"]["output_tokens_per_s"]
    )
    (link,) = rows["llamacpp"]["engine"].every("a")
    assert (report.folder / link.attributes["href"]).read_text().startswith("<!DOCTYPE html>")
    (other,) = set(rows) - {"llamacpp"}
    error = report.result["engines"][other]["error"].replace(str(report.folder.parent), "../..")
    assert rows[other]["stopped"].text == error


def test_the_cost_is_that_of_the_result(edited: Edited) -> None:
    cost = {"planned_days": 3.0, "planned_cost": 1230.0, "cost_per_million_tokens": 0.25}
    facts = edited("dense", lambda data: data["best"].update(cost=cost)).facts("summary")
    assert re.fullmatch(r"3 days, .*1,230", facts["Planned steps"].text)
    assert facts["Cost per million tokens"].value == 0.25


def test_tables_of_thousands_of_trials_list_the_best_the_failed_and_the_fastest(
    runs: Runs, copied: Callable[..., Path]
) -> None:
    def many(data: dict[str, Any]) -> None:
        slow = max((each for each in data["trials"] if each["measured"]), key=lambda each: lookup(each, STEP))
        for number in range(1000, 1000 + 450):
            failed = {"state": "failed", "measured": None} if number % 2 else {}
            data["trials"].append({**slow, "number": number, "role": "search", **failed})

    html = api.report(copied("dense", many))
    assert len(html) < 200_000
    details = set(re.findall(r'<details id="trial-(\d+)"', html))
    assert set(re.findall(r'href="#trial-(\d+)"', html)) <= details
    assert len(details) == MOST_LISTED
    assert {str(runs("dense").result[name]["number"]) for name in ("best", "baseline")} <= details


def test_the_speed_of_two_runs_is_that_of_their_median_time(edited: Edited) -> None:
    def noisy(data: dict[str, Any]) -> None:
        again, *others = (each for each in data["repeats"] if each["candidate"] == data["best"]["candidate"])
        first = next(each for each in data["trials"] if each["candidate"] == data["best"]["candidate"])
        for trial, seconds in ((first, 0.1), (again, 0.3)):
            trial["measured"]["step_time_s"]["median"] = seconds
            trial["measured"]["tokens_per_second_per_device"] = 8192.0 / seconds
        for each in others:
            each.update(state="failed", measured=None)

    facts = edited("dense", noisy).facts("summary")
    assert facts["Step time"].value == pytest.approx(0.2)
    assert facts["Speed"].value == pytest.approx(8192.0 / 0.2)


def test_a_best_whose_repeat_counts_instead_of_its_first_run_is_shown(edited: Edited) -> None:
    def disturbed(data: dict[str, Any]) -> None:
        first = next(each for each in data["trials"] if each["candidate"] == data["best"]["candidate"])
        first["inconclusive"] = True
        data["best"] = next(each for each in data["repeats"] if each["candidate"] == first["candidate"])

    rows = edited("dense", disturbed).rows("summary", "The fastest configurations")
    assert rows[0]["vs best"].value == pytest.approx(0.0)


@pytest.mark.parametrize("kind", FINISHED)
def test_the_terminal_and_the_page_show_the_same_figures(runs: Runs, kind: str) -> None:
    report = runs(kind)
    lines = (report.folder / "report.txt" if kind != "engines" else report.folder / "llamacpp/report.txt").read_text()
    facts = report.page.facts("summary")
    assert len(facts) > 3
    assert all(f"{name}: {element.text}" in lines for name, element in facts.items())
    used = facts["Device memory in use"].text.partition(" / ")[0] if "Device memory in use" in facts else ""
    assert used in report.page.section("memory").text


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_no_absolute_path_of_the_user(runs: Runs, kind: str) -> None:
    html = runs(kind).html
    assert str(runs(kind).folder.parent.parent) not in html
    assert sys.prefix not in html


def test_sizes_have_the_unit_that_fits() -> None:
    sizes = {7.62939453125e-06: "8 KiB", 0.5: "512 MiB", 80.0: "80 GiB", 2048.0: "2 TiB", 0.0: "0", -0.25: "-256 MiB"}
    assert {gib: size_text(gib and gib * 2**30) for gib in sizes} == sizes


def test_a_chart_compares_the_configurations_fastest_first(runs: Runs) -> None:
    report = runs("dense")
    rows = report.page.rows("summary", "The fastest configurations")
    medians = {each["trial"]: each["tokens_per_second_per_device"] for each in report.result["runs"]}
    for row in rows:
        assert row["tokens/s/device"].value == pytest.approx(medians[row["trial"].value])
    speeds = [row["tokens/s/device"].value or 0.0 for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert all((row["lowest"].value or 0) <= (row["highest"].value or 0) for row in rows)
