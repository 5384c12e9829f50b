"""The benchmarks run on small spaces and few records, and measured records become tuning tasks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_vendorkit.chip_file import cost_file

from benchmarks.scores import kendall, ranking
from flagcore import api
from flagcore.api.inputs import loaded_plugins
from flagcore.domain.chip import Chip
from flagcore.plugins import LoadedPlugins
from tests.checks import given
from tests.product.tasks import SHAPE

ROOT = Path(__file__).parents[3]


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


@pytest.mark.slow
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
    assert [file.name for file in docs.glob("accuracy/*")] == ["made-up.svg"]
    first_build = page, (docs / "accuracy" / "made-up.svg").read_text()
    run("accuracy.py", str(data), "--docs", str(docs), "--fitted", str(fitted))
    assert first_build == ((docs / "accuracy.md").read_text(), (docs / "accuracy" / "made-up.svg").read_text())


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
        assert start_arguments.keys() == shipped.keys()
        assert start_arguments["gemm_shares"].keys() == shipped["gemm_shares"].keys()


def test_tau_compares_orders_and_regret_is_the_loss_of_the_first_pick() -> None:
    assert kendall([1, 2, 3], [4, 5, 6]) == 1.0
    assert kendall([1, 2, 3], [6, 5, 4]) == -1.0
    assert kendall([1, 1, 1], [4, 5, 6]) == 0.0
    found = given(ranking({"reverse": [(3.0, 1.0), (2.0, 2.0), (None, 1.5)], "two only": [(1.0, 1.0), (2.0, 2.0)]}))
    assert (found.groups, found.regret) == (1, 1.0)
    equal = given(ranking({"equal": [(1.0, 1.0), (1.0, 2.0), (2.0, 9.0)]}))
    assert equal.regret == 0.5


@pytest.mark.long
def test_a_tune_on_simulated_hosts_survives_a_lost_one() -> None:
    short = ["--hosts", "8", "--trials", "3", "--repeats", "0", "--play", "0.3", "--start", "0.02", "--silence", "0.6"]
    figures: dict[str, Any] = json.loads(run("many_hosts.py", *short).splitlines()[-1])
    assert figures["lost"] == figures["ended_by_host"] >= 1
    assert 0.3 < figures["noticed_s"][0] < 10.0
    assert figures["trials"] == 3 + figures["lost"]
    assert figures["open_files"] >= 16
    assert figures["balanced"]
    assert figures["best_over_fastest"] < 2.0


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sweeps

    yield sweeps
    for name in ("sweeps", "fit_curves", "wrong_models", "searchers", "flagscale_rules"):
        sys.modules.pop(name, None)


@pytest.fixture
def loaded() -> Iterator[LoadedPlugins]:
    with loaded_plugins(()) as found:
        yield found


def records(**changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{tensor} {micro_batch}",
            "source": "Made up",
            "kind": "train",
            "model": SHAPE,
            "cluster": {"chip": "cpu", "devices": 4, "devices_per_node": 4},
            "train": {"seq_length": 128, "global_batch_size": 32, "precision": "bf16"},
            "candidate": {"tensor_model_parallel_size": tensor, "micro_batch_size": micro_batch},
            "measured": {"step_time_s": float(tensor * micro_batch)},
            **changes,
        }
        for tensor in (1, 2, 4)
        for micro_batch in (1, 2, 4, 8)
    ]


def test_a_sweep_of_a_fitted_source_is_predicted_by_the_curve_of_the_fit_without_it(
    sweeps: Any, loaded: LoadedPlugins
) -> None:
    cluster = {"chip": "A100-80GB", "devices": 4, "devices_per_node": 4}
    source = "vTrain ground truth (A100)"
    (own,) = sweeps.read_sweeps(records(cluster=cluster, source=source), loaded)
    (unrelated,) = sweeps.read_sweeps(records(cluster=cluster), loaded)
    assert not np.allclose(own.problem.predictions.step_time_s, unrelated.problem.predictions.step_time_s, rtol=1e-6)
    fitted = json.loads((BENCHMARKS / "fitted.json").read_text(encoding="utf-8"))["ampere"]["sources"][source]
    curve = own.problem.platform.costs.kernels.curve
    assert {name: getattr(curve, name) for name in fitted["left_out_parameters"]} == fitted["left_out_parameters"]


def test_a_sweep_gets_the_predictions_of_its_records(sweeps: Any, loaded: LoadedPlugins) -> None:
    some = records()
    (sweep,) = sweeps.read_sweeps(some, loaded)
    by_id = {answer["id"]: answer["step_time_s"]["value"] for answer in api.estimate_jobs(some)}
    for row in range(len(sweep.problem.space)):
        values = sweep.problem.space.candidate(row).as_dict()
        name = f"{values['tensor_model_parallel_size']} {values['micro_batch_size']}"
        assert sweep.problem.predictions.step_time_s[row] == pytest.approx(by_id[name])
        assert sweep.seconds[row] == values["tensor_model_parallel_size"] * values["micro_batch_size"]
