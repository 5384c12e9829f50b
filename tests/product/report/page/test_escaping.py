"""Logs, specs and names are written by others: nothing in them acts on the page."""

from pathlib import Path

from flagcore.report.page.blocks import (
    BEST,
    Bar,
    Bars,
    Chart,
    Code,
    Collapsed,
    Page,
    Plot,
    Section,
    Series,
    Text,
    as_html,
    linear,
    table,
)
from flagcore.report.page.run import tail
from flagcore.report.result import read_trial
from tests.product.report.page.conftest import HOSTILE, Runs
from tests.product.report.page.reading import read, run_data

MALICIOUS = (
    "</script></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"' --> ]]> & a|b ``` {{ 7*7 }} <a href='#x'>"
)


def malicious_page() -> Page:
    rows = [[MALICIOUS, 1.0]]
    axis = linear(MALICIOUS, [1.0, 2.0])
    series = Series(name=MALICIOUS, points=[(1.0, 2.0, MALICIOUS)], style=0)
    charts = [
        Chart(title=MALICIOUS, summary=MALICIOUS, drawing=drawing, table=table(MALICIOUS, [MALICIOUS, "n"], rows))
        for drawing in (
            Bars(MALICIOUS, [Bar(MALICIOUS, BEST, 1.0, 0.5, 2.0)]),
            Plot(x=axis, y=axis, series=[series], limits=[(MALICIOUS, 1.5)]),
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
    page = read(as_html(malicious_page()))
    assert len(list(page.root.every("script"))) == 1
    assert not list(page.root.every("img"))
    assert all(each.text == MALICIOUS for each in page.root.every("h1", "h2", "h3", "pre"))
    assert all(each.text.startswith(MALICIOUS) for each in page.root.every("title"))
    assert not [name for each in page.root.every() for name in each.attributes if name.startswith("on")]
    assert len(page.charts) == 2


def test_a_log_with_html_is_escaped(runs: Runs) -> None:
    report = runs("failed")
    shown_words = HOSTILE.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x07", "\N{REPLACEMENT CHARACTER}")
    logs = [each.text for each in report.page.section("trials").every("pre")]
    assert shown_words in logs
    assert sum("</pre><b>it is</b>" in text for text in logs) == len(report.result["trials"])
    reasons = [row["reason"].text for row in report.page.rows("summary", "Reasons")]
    assert reasons == [trial["reason"] for trial in report.result["trials"]]


def test_secrets_of_the_spec_are_left_out(runs: Runs) -> None:
    report = runs("serving")
    assert "a-secret-of-mine" in (report.folder / "spec.yaml").read_text()
    assert "a-secret-of-mine" not in report.html
    assert "HF_TOKEN" in report.html


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = tail(file).splitlines()
    assert lines[-1] == "line 99999"
    assert len(lines) == 25
    file.write_text("x" * 100_000)
    assert len(tail(file)) == 4000


def test_a_log_that_is_not_a_text_file_does_not_fail_the_trial(tmp_path: Path) -> None:
    import os

    assert tail(tmp_path / "none") == ""
    os.mkfifo(tmp_path / "pipe")
    assert tail(tmp_path / "pipe") == ""
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "\x00" not in tail(tmp_path / "binary")


def test_a_link_out_of_the_run_is_not_a_log_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("of the reader's own")
    folder = tmp_path / "run" / "trials" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("of the trial")
    (folder / "stderr.log").symlink_to(tmp_path / "private")
    run = run_data(folder=tmp_path / "run")
    assert run.tails(read_trial({"number": 0, "candidate": {}})) == [("stdout.log", "of the trial")]
