"""Trees are tuned by FlagScale's own training program, on CPU: `cpu_as_cuda` makes torch.cuda mean the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extras.flagscale.tests.accounting import CPU_TREE, write_tree

ENVIRONMENT = os.environ.get("REAL_MEGATRON", "")
ROOT = Path(__file__).parents[3]
SHIM = ROOT / "engines" / "megatron" / "tests" / "trial" / "cpu_as_cuda"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENVIRONMENT, reason="needs REAL_MEGATRON, a virtual environment with flag-scale 0.8.0"),
]


@pytest.mark.parametrize(("name", "candidates"), [("dense", 4), ("stages", 2)])
def test_a_tree_is_tuned_through_flagscales_own_program(name: str, candidates: int, tmp_path: Path) -> None:
    write_tree(CPU_TREE, tmp_path / "conf")
    code = "from flagcore.cli import main; main()"
    arguments = ("--config-path", "conf", "--config-name", name, "--run-dir", "run", "action=auto_tune")
    environment = {**os.environ, "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
    shim = f"experiment.envs.PYTHONPATH={SHIM}:{':'.join(folders())}"
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", *arguments, f"+{shim}"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: Any = json.loads((tmp_path / "run" / "result.json").read_text())
    measured = [each for each in result["trials"] if each["state"] == "measured"]
    assert len({json.dumps(each["candidate"]) for each in measured}) >= min(candidates, 2)
    assert result["counts"]["failed"] == 0, [each["reason"] for each in result["trials"]]
    assert not (tmp_path / "outputs").exists()  # checkpoints and logs of the job itself
    assert "flagscale/train/train_gpt.py" in (tmp_path / "run" / "best.sh").read_text()


def folders() -> list[str]:
    """Return what FlagScale's runner puts on PYTHONPATH."""
    (wheel,) = Path(ENVIRONMENT, "lib").glob("python3*/site-packages/flag_scale")
    return [str(wheel), str(wheel / "third_party" / "Megatron-LM")]
