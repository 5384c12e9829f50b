"""`flag probe`: ranks of worlds that this machine could not hold, played for real on a core of it. `flag tune` at each
fidelity as a user calls it: nothing started, ranks played on one core, and all of it."""

import csv
import io
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.megatron.tests.trial.trial_jobs import NEEDS_MEGATRON
from tests.checks import books_balance
from tests.product.cli.conftest import Answer, Flag, Project

pytestmark = [pytest.mark.slow, pytest.mark.together("training")]

WORLD: dict[str, Any] = {
    "cluster": {"chip": "cpu", "nodes": 1, "devices_per_node": 32, "memory_per_device": "2GiB"},
    "train": {"command": None, "precision": "fp32", "seq_length": 128, "global_batch_size": 64},
    "auto_tuner": {"control": {"train_iters": 2, "warmup_iters": 1, "max_time_per_task": 60}},
}
TWO_STAGES = "tensor_model_parallel_size=2,pipeline_model_parallel_size=2,data_parallel_size=8"
KNOBS = "tensor_model_parallel_size=2,pipeline_model_parallel_size=4,data_parallel_size=4"


@NEEDS_MEGATRON
@pytest.mark.costly
@pytest.mark.parametrize("chosen", [(16,), pytest.param((), marks=pytest.mark.long)])  # a rank takes 5 s
def test_ranks_of_a_world_of_32_are_measured_on_one_core(flag: Flag, project: Project, chosen: tuple[int, ...]) -> None:
    folder = project.folder / "kept"
    words = ["--candidate", TWO_STAGES, "--json", "--folder", str(folder)]
    completed = flag("probe", project.spec(**WORLD), *words, *(f"--rank={rank}" for rank in chosen)).worked()
    (found,) = json.loads(completed.out)
    assert found["devices"] == 32
    assert found["candidate"]["pipeline_model_parallel_size"] == 2
    assert [rank["rank"] for rank in found["ranks"]] == [*(chosen or (0, 16))]
    for rank in found["ranks"]:
        assert rank["state"] == "measured", rank["reason"]
        assert rank["stage"] == rank["rank"] // 16
        measured, predicted = rank["measured"], rank["predicted"]
        assert 0 < measured["static_gib"] <= measured["peak_allocated_gib"] < measured["device_used_gib"]
        assert measured["compute_time_s"] > 0 < measured["optimizer_time_s"]
        assert measured["microbatches"] == 8 > measured["microbatches_run"] >= 4
        assert predicted["rank"] == rank["rank"]
        assert (folder / "candidate-0" / f"rank-{rank['rank']}" / "launch.json").exists()
    combined, slowest = found["combined"], max(rank["measured"]["compute_time_s"] for rank in found["ranks"])
    assert combined["time"]["compute_s"] == slowest
    assert combined["time"]["pp_comm_s"] == found["predicted"]["time"]["pp_comm_s"]
    assert combined["memory"]["fits"] is True
    assert f"flag: probing rank {found['ranks'][0]['rank']} of 32: " in completed.err
    assert project.all_gone()


@NEEDS_MEGATRON
@pytest.mark.long
def test_the_table_has_a_line_per_rank_and_marks_scaled_figures(flag: Flag, project: Project) -> None:
    completed = flag("probe", project.spec(**WORLD), "--candidate", KNOBS, "--rank", "31").worked()
    heading, _, line = completed.out.splitlines()
    assert heading.split()[:4] == ["rank", "stage", "state", "static"]
    assert line.split()[:3] == ["31", "3", "measured"]
    assert "16 micro-batches" in completed.err
    assert "with probe: DP 4, TP 2, PP 4" in completed.err


@NEEDS_MEGATRON
@pytest.mark.costly
def test_memory_that_runs_out_is_a_result(flag: Flag, project: Project) -> None:
    small_spec = {**WORLD, "cluster": {"chip": "cpu", "nodes": 8, "devices_per_node": 1, "memory_per_device": "192MiB"}}
    tiny = {**small_spec, "model": {"hidden_size": 64, "ffn_hidden_size": 128}}
    completed = flag(
        "probe", project.spec(**tiny), "--candidate", "data_parallel_size=8", "--rank", "7", "--format", "csv"
    ).worked()
    (line,) = csv.DictReader(io.StringIO(completed.out))
    assert line["state"] == "out_of_memory"


@pytest.mark.costly
@NEEDS_MEGATRON
def test_interrupt_ends_a_probe_and_its_processes(project: Project) -> None:
    slow_spec = {**WORLD, "auto_tuner": {"control": {"train_iters": 10_000, "max_time_per_task": 600}}}
    process = project.start("probe", project.spec(**slow_spec), "--candidate", KNOBS, "--folder", str(project.folder))
    start_time = time.monotonic()
    while not list(project.folder.glob("candidate-0/rank-0/launch.json")) and time.monotonic() < start_time + 60:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert project.all_gone()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--candidate", "tensor_model_parallel_size=3"], "is not legal"),
        (["--candidate", "tensor_model_paralel_size=2"], "tensor_model_paralel_size"),
        (["--candidate", "1000000"], "there are"),
        (["--candidate", "1", "--top", "2"], "--candidate and --top"),
        (["--rank", "32"], "the last rank is 31"),
        (["--seconds", "5 parsecs"], "5min"),
        (["--seconds", "2d"], "172800"),
        (["--chip", "H100-SXM"], "no H100-SXM on this machine"),
    ],
)
def test_invalid_requests_are_reported(flag: Flag, project: Project, arguments: list[str], says: str) -> None:
    completed = flag("probe", project.spec(**WORLD), *arguments)
    assert completed.code in (2, 4)
    assert says in completed.err


def test_probing_servers_is_rejected_with_an_alternative(flag: Flag) -> None:
    flag("probe", str(Path(__file__).parents[3] / "examples" / "serve-cpu.yaml")).refused(2, "serve.engine")


EXAMPLE = str(Path(__file__).parents[3] / "examples" / "train-1024-probe.yaml")
CONTROL = {"train_iters": 2, "warmup_iters": 1, "max_time_per_task": 60}
LARGE: dict[str, Any] = {
    "cluster": {
        "chip": "cpu",
        "nodes": 2,
        "devices_per_node": 4,
        "memory_per_device": "2GiB",
        "nic_bytes_per_second": 1e9,
    },
    "train": {"command": None, "precision": "fp32", "seq_length": 64, "global_batch_size": 16},
}


def world(project: Project, **control: Any) -> str:
    """Write the spec of a task of two nodes, which trials could not run here."""
    return project.spec(**LARGE, control={**CONTROL, **control})


@pytest.mark.costly
def test_the_example_of_1024_devices_is_estimated_without_any_of_them(
    flag: Flag, answer: Answer, project: Project
) -> None:
    completed = flag("tune", EXAMPLE, "--fidelity", "estimate", "--run-dir", str(project.run_dir)).worked()
    assert "Recommended on 1024 x H100-SXM: " in completed.out
    assert any(line.startswith("  Speed: ~") for line in completed.out.splitlines())
    assert completed.out.strip() == (project.run_dir / "report.txt").read_text().strip()
    result = project.result()
    assert result["fidelity"] == "estimate"
    assert {trial["state"] for trial in result["trials"]} == {"predicted"}
    assert result["best"]["predicted"]["memory"]["fits"] is True
    assert result["gain"] > 0
    assert result["counts"]["measured"] == 0
    assert result["counts"]["untried"] > 1000
    best = yaml.safe_load((project.run_dir / "best.yaml").read_text())
    assert best["auto_tuner"]["space"] == result["best"]["candidate"]
    assert "fidelity" not in best["auto_tuner"]["control"]
    script = (project.run_dir / "best.sh").read_text()
    assert {"#SBATCH --nodes=128", "#SBATCH --gpus-per-node=8"} < set(script.splitlines())
    assert "--nnodes=128" in script
    assert "--num-layers 80" in script
    assert subprocess.run(["bash", "-n", project.run_dir / "best.sh"], check=False).returncode == 0
    assert answer("estimate", project.run_dir / "best.yaml")[0]["candidate"] == result["best"]["candidate"]


@pytest.mark.costly
def test_the_best_of_an_estimate_for_this_machine_can_be_started(answer: Answer, project: Project) -> None:
    spec = project.spec(control={"fidelity": "estimate", "run_best": True})
    assert answer("tune", spec, "--run-dir", project.run_dir) == project.result()
    assert not (project.run_dir / "trials").exists()
    run_output = project.run("run", str(project.run_dir)).worked()
    assert "elapsed time per iteration" in run_output.out
    (line,) = run_output.err.splitlines()
    assert f"training the best configuration of {project.run_dir}" in line
    assert line.endswith(str(project.run_dir / "best"))
    (project.run_dir / "best.sh").unlink()
    project.run("run", str(project.run_dir)).refused(2, str(project.run_dir / "best.sh"))


def test_a_run_may_raise_its_fidelity_but_not_lower_it(flag: Flag, project: Project) -> None:
    spec = project.spec(control={"max_trials": 2, "repeats": 0})
    arguments = ("tune", spec, "--run-dir", str(project.run_dir))
    assert flag(*arguments, "--fidelity", "estimate").code == 0
    flag(*arguments).worked()
    saved = project.result()
    assert saved["fidelity"] == "run"
    assert len(saved["trials"]) == 2
    flag(*arguments, "--fidelity", "estimate").refused(2, "fidelity run")
    assert project.result() == saved


@pytest.mark.parametrize("control", [{"fidelity": "probe"}, {"probes": 2}])
def test_a_custom_command_cannot_be_probed(flag: Flag, project: Project, control: dict[str, Any]) -> None:
    completed = flag("tune", project.spec(control=control), "--run-dir", str(project.run_dir)).refused(
        2, "train.command"
    )
    assert completed.err.count("\n") == 1


@NEEDS_MEGATRON
@pytest.mark.long
def test_two_nodes_are_tuned_by_probes_on_one_core(
    flag: Flag, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(project.folder / "home"))
    completed = flag(
        "tune", world(project, max_trials=1), "--run-dir", str(project.run_dir), "--fidelity", "probe"
    ).worked()
    assert "Best probed configuration on 8 x cpu: " in completed.out
    assert "predicted communication and waiting" in completed.out
    assert "probe 0 (baseline) starts: " in completed.err
    result = project.result()
    assert result["fidelity"] == "probe"
    assert result["repeats"] == []
    assert books_balance(result)
    for trial in result["trials"]:
        assert (trial["state"], trial["fidelity"]) == ("measured", "probe"), trial["reason"]
        step = trial["measured"]["step_time_s"]
        assert 0 <= step["modelled"] < step["median"]
        assert step["low"] < step["median"] < step["high"]
        assert trial["measured"]["device_used_gib"] > 0.05
        assert (project.run_dir / trial["log"]).exists()
    assert not list((project.folder / "home").rglob("*.jsonl")), "a probe was kept as if it had run"
    assert project.all_gone()
