"""What every page has, whatever the run, and the stages of a mixed cluster."""

import re
from base64 import b64encode
from hashlib import sha256
from itertools import pairwise

import pytest

from flagcore.report.page.blocks import Table
from flagcore.report.page.resources import pipeline
from tests.product.report.page.conftest import KINDS, Made, Runs
from tests.product.report.page.reading import run_data


@pytest.fixture(params=KINDS)
def report(runs: Runs, request: pytest.FixtureRequest) -> Made:
    """Each kind of run."""
    return runs(request.param)


def test_headings_and_landmarks_lead_through_the_page(report: Made) -> None:
    page = report.page
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


def test_every_link_has_a_target_and_no_id_is_used_twice(report: Made) -> None:
    page = report.page
    places = [each.attributes["id"] for each in page.root.every() if "id" in each.attributes]
    assert len(places) == len(set(places))
    targets = [each.attributes["href"] for each in page.root.every("a")]
    assert targets
    assert {target[1:] for target in targets if target.startswith("#")} <= set(places)
    assert all((report.folder / target).exists() for target in targets if not target.startswith("#"))


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(report: Made) -> None:
    page = report.page
    assert not list(page.root.every("link", "img", "iframe", "object", "form"))
    assert not [each for each in page.root.every() if {"src", "srcset", "onclick", "onerror"} & each.attributes.keys()]
    policy = next(each.attributes["content"] for each in page.root.every("meta") if "http-equiv" in each.attributes)
    assert "default-src 'none'" in policy
    scripts = [each.text for each in page.root.every("script") if "type" not in each.attributes]
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts]
    assert re.findall(r"'sha256-[^']+'", policy) == hashes


def test_every_chart_is_described_and_has_its_figures_in_a_table(report: Made) -> None:
    page = report.page
    figures = list(page.root.every("figure"))
    assert len(figures) == len(page.charts)
    for figure in figures:
        (plot,) = [each for each in figure.every("div") if each.attributes.get("role") == "img"]
        title = next(figure.every("h3")).text
        assert title in plot.attributes["aria-label"]
        assert next(figure.every("figcaption")).text.removeprefix(title)
        assert list(next(figure.every("table")).every("td"))


def test_every_table_has_a_caption_and_headings_for_columns_and_rows(report: Made) -> None:
    for table in report.page.root.every("table"):
        assert next(table.every("caption")).text
        columns = [each for head in table.every("thead") for each in head.every("th")]
        assert all(each.attributes["scope"] == "col" and each.text for each in columns)
        for body in table.every("tbody"):
            for row in body.every("tr"):
                assert next(row.every("th")).attributes["scope"] == "row"
                assert len(list(row.every("th", "td"))) == len(columns)


def test_series_of_a_chart_differ_by_more_than_colour(report: Made) -> None:
    for chart in report.page.charts:
        for legend in chart.every("ul"):
            shapes = [next(entry.every("path", "line")) for entry in legend.every("li")]
            styles = [each.attributes.get("d") or each.attributes["class"] for each in shapes]
            assert len(styles) == len(set(styles))


def test_the_page_is_small(report: Made) -> None:
    assert len(report.html.encode()) < 500_000


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
    times = {"forward_s": [1.0, 2.0], "backward_s": [2.0, 3.0], "weight_s": [1.0, 1.0], "predicted_s": 25.0}
    paired = {"paired_s": [2.5, 4.0]} if schedule == "dualpipe" else {}
    section = pipeline(run_data({"pipelines": [{**passes, **times, **paired}]}))
    assert section is not None
    (stages,) = section.blocks
    assert isinstance(stages, Table)
    assert schedule in stages.caption
    assert len(stages.headings) == 1 + columns + 2
    assert [row[-2].value for row in stages.rows] == [12.0, 20.0]
    assert [row[-1].value for row in stages.rows] == pytest.approx([0.52, 0.2])
