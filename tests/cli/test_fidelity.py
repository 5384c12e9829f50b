"""`flag tune` at each fidelity as a user calls it: nothing started, ranks played on one core, and all of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import SPACE, Project, Ran
from tests.cli.test_tune import books_balance

Flag = Callable[..., Ran]
pytestmark = pytest.mark.slow
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train-1024-probe.yaml")
CONTROL = {"train_iters": 2, "warmup_iters": 1, "max_time_per_task": 60, "max_trials": 2}
WORLD: dict[str, Any] = {
    "cluster": {
        "chip": "cpu",
        "nodes": 2,
        "devices_per_node": 4,
        "memory_per_device": "2GiB",
        "nic_bytes_per_second": 1e9,
    },
    "train": {"command": None, "seq_length": 64, "global_batch_size": 16},
}


def world(project: Project, **control: Any) -> str:
    """Write the spec of a task of two nodes, which trials could not run here."""
    return project.spec(**WORLD, control={**CONTROL, **control})


def ranks_probed(project: Project) -> list[tuple[str, str]]:
    """Return the candidate and the rank of each probe that ended well, as often as it ran."""
    found = []
    for file in project.run_dir.glob("trials/*/rank-*/exit.json"):
        ended = json.loads(file.read_text())
        if ended["code"] == 0 and ended["ended_by"] is None:
            job = json.loads(file.with_name("job.json").read_text())
            found.append((json.dumps(job["candidate"], sort_keys=True), file.parent.name))
    return found


def test_the_example_of_1024_devices_is_estimated_without_any_of_them(flag: Flag, project: Project) -> None:
    ran = flag("tune", EXAMPLE, "--fidelity", "estimate", "--run-dir", str(project.run_dir))
    assert ran.code == 0, ran.err
    assert "Best predicted configuration on 1024 x H100-SXM: " in ran.out
    assert ran.out.splitlines()[1].startswith("  Speed: ~")
    assert ran.out.strip() == (project.run_dir / "report.txt").read_text().strip()
    found = project.result()
    assert found["fidelity"] == "estimate"
    assert {trial["state"] for trial in found["trials"]} == {"predicted"}
    assert found["best"]["predicted"]["memory"]["fits"] is True
    assert found["gain"] > 0
    assert found["counts"]["measured"] == 0
    assert found["counts"]["untried"] > 1000
    best = yaml.safe_load((project.run_dir / "best.yaml").read_text())
    assert best["auto_tuner"]["space"] == found["best"]["candidate"]
    assert "fidelity" not in best["auto_tuner"]["control"]
    script = subprocess.run([project.run_dir / "best.sh"], capture_output=True, text=True, check=False)
    assert script.returncode == 0
    assert "--nnodes=128" in script.stdout
    assert "--num-layers 80" in script.stdout
    again = flag("estimate", str(project.run_dir / "best.yaml"), "--json")
    assert json.loads(again.out)[0]["candidate"] == found["best"]["candidate"]


def test_the_example_of_1024_devices_is_not_probed_where_there_is_none(flag: Flag, project: Project) -> None:
    ran = flag("tune", EXAMPLE, "--fidelity", "probe", "--run-dir", str(project.run_dir))
    assert ran.code == 4
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("flag: ")
    assert not project.run_dir.exists()


def test_an_estimate_that_fits_this_machine_can_be_started(flag: Flag, project: Project) -> None:
    spec = project.spec(control={"fidelity": "estimate", "run_best": True})
    ran = flag("tune", spec, "--run-dir", str(project.run_dir), "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == project.result()
    assert not (project.run_dir / "trials").exists()
    started = project.run("run", str(project.run_dir))
    assert started.code == 0
    assert "elapsed time per iteration" in started.out
    (line,) = started.err.splitlines()
    assert f"training the best of {project.run_dir}" in line
    assert line.endswith(str(project.run_dir / "best"))


def test_a_run_may_raise_its_fidelity_but_not_lower_it(flag: Flag, project: Project) -> None:
    spec = project.spec(control={"max_trials": 2, "repeats": 0})
    arguments = ("tune", spec, "--run-dir", str(project.run_dir))
    assert flag(*arguments, "--fidelity", "estimate").code == 0
    ran = flag(*arguments)
    assert ran.code == 0, ran.err
    kept = project.result()
    assert kept["fidelity"] == "run"
    assert len(kept["trials"]) == 2
    down = flag(*arguments, "--fidelity", "estimate")
    assert down.code == 2
    assert "fidelity run" in down.err
    assert project.result() == kept


@pytest.mark.parametrize("control", [{"fidelity": "probe"}, {"probes": 2}])
def test_a_custom_command_cannot_be_probed(flag: Flag, project: Project, control: dict[str, Any]) -> None:
    ran = flag("tune", project.spec(control=control), "--run-dir", str(project.run_dir))
    assert ran.code == 2
    assert "train.command" in ran.err
    assert ran.err.count("\n") == 1


@needs_megatron
def test_two_nodes_are_tuned_by_probes_on_one_core(
    flag: Flag, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(project.folder / "home"))
    ran = flag("tune", world(project), "--run-dir", str(project.run_dir), "--fidelity", "probe")
    assert ran.code == 0, ran.err
    assert "Best probed configuration on 8 x cpu: " in ran.out
    assert "modelled communication and waiting" in ran.out
    assert "probe 0 (baseline) starts: " in ran.err
    found = project.result()
    assert found["fidelity"] == "probe"
    assert found["repeats"] == []
    assert books_balance(found)
    for trial in found["trials"]:
        assert (trial["state"], trial["fidelity"]) == ("measured", "probe"), trial["reason"]
        step = trial["measured"]["step_time_s"]
        assert 0 <= step["modelled"] < step["median"]
        assert step["low"] < step["median"] < step["high"]
        assert trial["measured"]["device_used_gib"] > 0.05
        assert (project.run_dir / trial["log"]).exists()
    assert not list((project.folder / "home").rglob("*.jsonl")), "a probe was kept as if it had run"
    assert project.all_gone()


@needs_megatron
@pytest.mark.long
def test_a_run_killed_while_probing_leaves_no_process_and_repeats_no_finished_probe(project: Project) -> None:
    spec = world(project)
    arguments = ("tune", spec, "--run-dir", str(project.run_dir), "--fidelity", "probe", "--json", "-q")
    for finished in (1, 2, 4):
        process = project.start(*arguments)
        started = time.monotonic()
        while len(ranks_probed(project)) < finished and process.poll() is None and time.monotonic() < started + 60:
            time.sleep(0.02)
        time.sleep(0.5 * finished)
        process.kill()
        process.communicate()
        assert project.all_gone()
    ran = project.run(*arguments)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found == project.result()
    assert [trial["state"] for trial in found["trials"]] == ["measured"] * 2
    assert books_balance(found)
    done = ranks_probed(project)
    assert len(set(done)) == len(done), "a finished probe was repeated"


@needs_megatron
@pytest.mark.long
def test_probes_go_before_real_runs(flag: Flag, project: Project) -> None:
    small = {**WORLD, "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB"}}
    spec = project.spec(**small, control={**CONTROL, "probes": 2, "max_trials": 2, "repeats": 0})
    ran = flag("tune", spec, "--run-dir", str(project.run_dir))
    assert ran.code == 0, ran.err
    found = project.result()
    assert [probe["fidelity"] for probe in found["probes"]] == ["probe", "probe"]
    assert [trial["fidelity"] for trial in found["trials"]] == ["run", "run"]
    assert [trial["number"] for trial in found["trials"]] == [2, 3]
    assert found["best"]["fidelity"] == "run"
    assert books_balance(found)


@needs_megatron
@pytest.mark.long
def test_a_run_killed_in_any_phase_resumes_without_loss(project: Project) -> None:
    small = {**WORLD, "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB"}}
    control = {**CONTROL, "probes": 2, "max_trials": 2, "repeats": 1}
    fast = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "micro_batch_size": 4}
    slow = {"tensor_model_parallel_size": 2, "micro_batch_size": 1}
    tuner = {"space": {**SPACE, **fast}, "baseline": slow, "control": control}
    arguments = ("tune", project.spec(**small, auto_tuner=tuner), "--run-dir", str(project.run_dir))
    for what in ("probe", "(baseline)", "(search)", "(repeat)"):
        process = project.start(*arguments)
        assert process.stderr is not None
        reported = next((line for line in process.stderr if " starts: " in line and what in line), "")
        assert reported, f"it ended before any {what} started"
        time.sleep(0.5)
        process.kill()
        process.communicate()
        assert project.all_gone()
    ran = project.run(*arguments, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found == project.result()
    reported = [(trial["number"], trial["state"], trial["reason"]) for trial in (*found["probes"], *found["trials"])]
    probes = [probe for probe in found["probes"] if probe["state"] == "measured"]
    assert len({json.dumps(probe["candidate"], sort_keys=True) for probe in probes}) == len(probes) == 2, reported
    assert [trial["state"] for trial in found["trials"]] == ["measured"] * 2
    repeated = [trial for trial in found["repeats"] if trial["state"] == "measured"]
    assert len(repeated) >= 2
    assert books_balance(found)
    done = ranks_probed(project)
    assert len(set(done)) == len(done), "a finished probe was repeated"
