"""`flag tune` with a command of Megatron's kind: what its result can be used for."""

import json
import os
import subprocess
import sys

import pytest

from tests.product.cli.conftest import Flag, Project

pytestmark = [pytest.mark.slow, pytest.mark.spread]


def test_the_best_can_be_rerun_reread_and_reestimated(flag: Flag, project: Project) -> None:
    model = project.folder / "model"
    model.mkdir()
    config = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, **config})
    )
    assert flag("tune", project.spec(model="./model"), "--run-dir", str(project.run_dir)).code == 0
    rerun = flag("estimate", str(project.run_dir / "best.yaml"), "--json").worked()
    assert project.result()["best"]["candidate"] in [row["candidate"] for row in json.loads(rerun.out)]
    completed = project.run("run", str(project.run_dir)).worked()
    assert "elapsed time per iteration (ms): 101.0" in completed.out
    script = project.run_dir / "best.sh"
    assert os.access(script, os.X_OK)
    assert os.popen(f"cd / && {script}").read().count("elapsed time per iteration (ms)") == 3
    explanation = flag("explain", str(project.run_dir)).worked()
    assert "measured" in explanation.out


def test_the_best_is_started_at_the_end_if_the_spec_requests_it(flag: Flag, project: Project) -> None:
    spec = project.spec(control={"run_best": True, "max_trials": 2})
    completed = project.run("tune", spec, "--run-dir", str(project.run_dir), "--json").worked()
    assert json.loads(completed.out)["best"]
    assert "elapsed time per iteration" in completed.err


def test_without_a_megatron_there_is_no_way_to_run_its_trial_program(project: Project) -> None:
    (project.folder / "torch.py").write_text("raise ImportError")
    spec = project.spec(train={"command": None})
    first = "import sys, flagcore.tuner.strategies.learned"  # scipy asks what is loaded whether it is torch
    code = f"{first}; sys.modules['torch'] = None; from flagcore.cli import main; main()"
    completed_process = subprocess.run(
        [sys.executable, "-c", code, "tune", spec], capture_output=True, text=True, cwd=project.folder, timeout=120
    )
    assert completed_process.returncode == 4
    assert "pip install" in completed_process.stderr
    assert "Traceback" not in completed_process.stderr
