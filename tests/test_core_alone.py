"""The core without engines, plugins and extras: its commands work, and its tests import nothing of them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from sysconfig import get_path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import contextlib, io, json, sys
sys.path[:0] = [sys.argv[1]]
from flagcore.cli.main import main
done = []
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            done.append([end.code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""
SPEC = """\
model: {num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 1000}
train: {engine: megatron, seq_length: 32, global_batch_size: 8, precision: fp32}
"""
SERVED = "model: Qwen/Qwen3-8B\nserve: {engine: vllm}\n"


@pytest.mark.slow
def test_commands_work_without_any_engine_or_plugin(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for each in Path(get_path("purelib")).iterdir():
        if not re.match("_*(editable|flagcore)[^-]*[_-](?!0)|.*[.]pth$", each.name):
            (site / each.name).symlink_to(each)
    (site / "flagcore").symlink_to(ROOT / "flagcore")
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "served.yaml").write_text(SERVED)
    asked = (
        "--help",
        "plugins list",
        "devices",
        "doctor",
        "schema",
        "tune spec.yaml",
        "tune served.yaml",
    )
    words = [sys.executable, "-S", "-E", "-c", PROGRAM, str(site), json.dumps([each.split() for each in asked])]
    answers = json.loads(subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True).stdout)
    assert [code for code, _, _ in answers] == [0, 0, 4, 0, 0, 2, 2]
    assert "tune" in answers[0][1]
    assert json.loads(answers[-3][1])["title"] == "flagcore spec"
    assert "pip install flagcore-megatron" in answers[-2][2]
    assert "serve.engine" in answers[-1][2]
    assert "pip install flagcore-vllm" in answers[-1][2]


def test_tests_of_the_core_import_no_engine_and_no_extra() -> None:
    allowed = {"flagcore_testing", "flagcore_cpu"}
    for file in (ROOT / "tests").rglob("*.py"):
        if (ROOT / "tests" / "product") not in file.parents:
            named = re.findall(
                r"^\s*(?:from|import) (flagcore_\w+|engines|extras|tests\.product)", file.read_text(), re.M
            )
            assert set(named) <= allowed, file
