"""The benchmarks run on small spaces and few records, and measured records become tuning tasks. The
page of findings, which scripts outside CI check, and the releases that rules name."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_vendorkit.chip_file import cost_file

from benchmarks.scores import kendall, ranking, read_records
from flagcore.domain.chip import Chip
from tests.checks import given
from tests.product.tasks import SHAPE
from tools import findings, releases

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


JOB: dict[str, Any] = {
    "kind": "train",
    "source": "Made up",
    "model": {"name": "tiny", **SHAPE},
    "cluster": {"chip": "cpu", "devices": 4, "devices_per_node": 4},
    "train": {"seq_length": 512, "global_batch_size": 16, "precision": "bf16", "attention": "flash"},
}


def record(name: str, tensor: int, measured: dict[str, float], **changes: Any) -> dict[str, Any]:
    candidate = {"tensor_model_parallel_size": tensor, "data_parallel_size": 4 // tensor, "micro_batch_size": 1}
    return {**JOB, "id": name, "candidate": candidate, "measured": measured, **changes}


@pytest.mark.long
def test_the_accuracy_page_includes_invalid_records(tmp_path: Path) -> None:
    data, docs, fitted = tmp_path / "data", tmp_path / "docs", tmp_path / "fitted.json"
    data.mkdir()
    unrelated = {"chip": "unknown chip", "devices": 4, "devices_per_node": 4}
    train = [
        record("one", 1, {"step_time_s": 1.0, "peak_gib": 2.0}),
        record("two", 2, {"step_time_s": 3.0}),
        record("three", 4, {"step_time_s": 5.0}),
        record("strange", 4, {"step_time_s": 7.0}, cluster=unrelated),
        record("rate", 2, {"model_tflops_per_gpu": 0.05}),
    ]
    (data / "train_jobs.jsonl").write_text("\n".join(map(json.dumps, train)))
    rank = record("rank", 2, {"static_gib": 1.0, "fwd_bwd_s": 2.0}, rank=0)
    (data / "rank_jobs.jsonl").write_text(json.dumps(rank))
    fit = {"runs": 3, "fitted_mape": 0.1, "left_out_mape": 0.25, "left_out_measured_over_predicted": [0.9, 1.0, 1.1]}
    fitted.write_text(json.dumps({"family": {"sources": {"Made up": fit}}}))
    run("accuracy.py", str(data), "--docs", str(docs), "--fitted", str(fitted))
    page = (docs / "accuracy.md").read_text()
    assert "| Made up | 4 | 3 |" in page
    assert "| Made up (from model flops) | 1 | 1 |" in page
    assert "| source | ranks | static memory | compute time |" in page
    assert "| Made up, dense | 1 |" in page
    assert "| strange | Made up | no installed plugin lists the chip" in page
    assert "| Made up | 3 | 10.0% | 25.0% | 0.90 to 1.10 |" in page
    plots = docs / "accuracy-time.svg"
    assert plots.read_text().count("<title>Made up</title>") == 1
    first_build = page, plots.read_text()
    run("accuracy.py", str(data), "--docs", str(docs), "--fitted", str(fitted))
    assert first_build == ((docs / "accuracy.md").read_text(), plots.read_text())


@pytest.mark.parametrize("name", ["ampere", "hopper", "blackwell"])
def test_shipped_curves_have_the_fixed_values_of_a_refit(name: str) -> None:
    fit_curves = pytest.importorskip("benchmarks.fit_curves")  # needs scipy
    family = fit_curves.FAMILIES[name]
    for chip in family.chips:
        text, _ = cost_file(family.package.rpartition("/")[2], Chip(name=chip, vendor="nvidia"), "curve.yaml")
        shipped = yaml.safe_load(text)["curve"]
        for key, value in family.fixed.items():
            part, _, precision = key.partition(".")
            if key != "host_bytes_per_second":  # a chip's own is kept
                assert (shipped[part][precision] if precision else shipped[part]) == value, (chip, key)
        start_arguments = fit_curves._arguments(family, family.start, chip)
        assert start_arguments.keys() - {"launch_seconds"} == shipped.keys() - {"launch_seconds"}
        assert start_arguments["gemm_shares"].keys() == shipped["gemm_shares"].keys()


def test_tau_compares_orders_and_regret_is_the_loss_of_the_first_pick() -> None:
    assert kendall([1, 2, 3], [4, 5, 6]) == 1.0
    assert kendall([1, 2, 3], [6, 5, 4]) == -1.0
    assert kendall([1, 1, 1], [4, 5, 6]) == 0.0
    found = given(ranking({"reverse": [(3.0, 1.0), (2.0, 2.0), (None, 1.5)], "two only": [(1.0, 1.0), (2.0, 2.0)]}))
    assert (found.groups, found.regret) == (1, 1.0)
    equal = given(ranking({"equal": [(1.0, 1.0), (1.0, 2.0), (2.0, 9.0)]}))
    assert equal.regret == 0.5


FOUND = list(findings.findings())


def test_a_record_has_what_the_page_of_its_source_says(tmp_path: Path) -> None:
    names = ("nvidiamegatron-0275", "another")
    job = {"source": "page", "train": {"precision": "fp8"}, "candidate": {"micro_batch_size": 4}, "measured": {"s": 1}}
    lines = (json.dumps({"id": name, **job}) for name in names)
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    corrected, other = read_records(tmp_path / "jobs.jsonl")
    assert corrected["train"] == {"precision": "mxfp8", "notes": "capacity factor 1.0; cuda_graph_impl=local"}
    assert (corrected["candidate"], other) == (job["candidate"], {"id": "another", **job})


def test_the_table_of_findings_is_current() -> None:
    assert (findings.FOLDER / "README.md").read_text(encoding="utf-8") == findings.table(FOUND), (
        "run `python tools/findings.py table`"
    )


@pytest.mark.parametrize("finding", FOUND, ids=lambda each: each.name)
def test_a_finding_prints_the_releases_that_it_pins(finding: findings.Finding) -> None:
    text = (findings.FOLDER / finding.name).read_text(encoding="utf-8")
    pins = dict(re.findall(r"(?<=\s)([\w.-]+)==([\w.]+)", text.partition("cat >")[0]))
    package, release = finding.fields["Package"].split(",")[0].split()
    assert pins[package] == release
    helpers = {"aiohttp", "numpy", "packaging", "triton"} | ({"gguf"} if package == "xllamacpp" else set())
    shown = finding.fields["Output"].strip().partition("\n")[0].split(", ")
    assert {f"{name} {pins[name]}" for name in pins.keys() - helpers} <= set(shown)


def test_the_page_of_engines_has_all_findings() -> None:
    page = (ROOT / "docs" / "engines-really.md").read_text(encoding="utf-8")
    assert [each.name for each in FOUND if f"](../findings/{each.name})" not in page] == []


def test_the_tests_that_the_page_of_engines_names_exist() -> None:
    page = (ROOT / "docs" / "engines-really.md").read_text(encoding="utf-8")
    folders = [ROOT / name for name in ("tests", "engines", "extras", "plugins")]
    sources = "".join(file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in sources] == []


def test_a_script_that_fails_has_changed(tmp_path: Path) -> None:
    (tmp_path / "same.sh").write_text("echo 1")
    (tmp_path / "changed.sh").write_text("echo 'the output changed' >&2; exit 1")
    assert findings.run(tmp_path / "same.sh") == ""
    assert findings.run(tmp_path / "changed.sh") == "the output changed"


def test_a_comment_without_a_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.sh").write_text("#!/bin/sh\n# A surprise.\n#\n# Topic: Caches\nset -eu\n")
    with pytest.raises(ValueError, match=r"some\.sh: the comment must have the fields"):
        list(findings.findings(tmp_path))


def test_releases_are_read_from_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "engines" / "some" / "flagcore_some"
    rules.mkdir(parents=True)
    (rules / "rules.yaml").write_text(
        "# vllm 0.9 and vLLM 0.33: `config.py`\nkey: 1  # DeepSpeed 0.19.8\n# vllm @067f987d\n"
    )
    found = releases.seen(tmp_path)
    assert found == {
        "deepspeed": {"0.19.8": ["engines/some/flagcore_some/rules.yaml:2"]},
        "vllm": {
            **{release: ["engines/some/flagcore_some/rules.yaml:1"] for release in ("0.33", "0.9")},
            "@067f987d": ["engines/some/flagcore_some/rules.yaml:3"],
        },
    }
    assert releases.table(found).splitlines()[-1] == "| `vllm` | 0.33, 0.9, @067f987d |"
