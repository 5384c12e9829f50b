"""`flag init`, `flag import ENGINE` and `flag export`: from what people have to files, on the command line."""

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.errors import UsageError
from tests.product.cli.conftest import FLAG, Answer, Flag

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_new_spec_is_estimated_and_exported(flag: Flag, engine: str, tmp_path: Path) -> None:
    argv = ("init", "--model", "model", "--engine", engine, "--chip", "H100-SXM", "-o", "spec.yaml")
    flag(*argv).worked()
    assert flag(*argv).code == 2  # the file exists
    assert flag(*argv, "--force").code == 0
    assert "# engine: " in (tmp_path / "spec.yaml").read_text()
    flag("estimate", "spec.yaml", "--top", "1", "--json").worked()
    exported = flag("export", "spec.yaml", "--to", engine).worked()
    assert (tmp_path / exported.out.splitlines()[-1]).is_file()


def test_missing_values_are_asked_for_on_a_terminal_only(flag: Flag, tmp_path: Path) -> None:
    assert flag("init", "--engine", "vllm").code == 2
    main, other = pty.openpty()
    process = subprocess.Popen([*FLAG, "init", "--engine", "vllm"], stdin=other, stdout=subprocess.PIPE)
    os.write(main, b"nowhere\nmodel\nH1OO\nH100\n\n0\n4\n\n64\nmany\n\np99 ttft\np99 ttft 600ms\n")
    text, _ = process.communicate(timeout=30)
    os.close(main)
    os.close(other)
    data = yaml.safe_load(text)
    assert data["cluster"] == {"chip": "H100", "nodes": 1, "devices_per_node": 4}
    assert data["serve"]["profile"]["output_len"] == 64
    assert data["serve"]["slo"] == {"ttft_s": {"p99": 0.6}}


@pytest.mark.parametrize(
    "arguments",
    [
        ("init", "--model", "nowhere", "--engine", "vllm"),
        ("init", "--model", "model", "--engine", "none"),
        ("init", "--model", "model", "--engine", "vllm", "--seq-length", "8"),
        ("import", "vllm"),
        ("import", "vllm", "llama-server -m x"),
        ("import", "none", "x"),
    ],
)
def test_bad_input_is_wrong_usage(flag: Flag, arguments: tuple[Any, ...]) -> None:
    completed = flag(*arguments)
    assert completed.code == 2
    assert completed.out == ""


def test_an_imported_command_is_printed_with_its_notes_on_stderr(flag: Flag, tmp_path: Path) -> None:
    completed = flag(
        "import", "vllm", "--chip", "H100-SXM", "--", *["vllm", "serve", "model", "--tp", "2", "--port", "9"]
    ).worked()
    assert yaml.safe_load(completed.out)["auto_tuner"]["baseline"]["tensor_model_parallel_size"] == 2
    assert "--port" in completed.err


def test_unknown_chip_is_refused_with_near_names(flag: Flag) -> None:
    for command in (("init", "--engine", "vllm", "--model", "model"), ("import", "vllm", "vllm serve ./model")):
        flag(*command, "--chip", "H2000").refused(2, "H200")


def test_a_public_model_is_planned_without_a_file(flag: Flag, answer: Answer) -> None:
    options = ("--model", "Qwen/Qwen3-8B", "--chip", "H100", "--devices", "2", "--top", "1")
    assert "max_num_seqs" in answer("estimate", *options)[0]["candidate"]
    (training,) = answer("estimate", *options, "--engine", "megatron", "--set", "train.global_batch_size=8")
    assert "micro_batch_size" in training["candidate"]
    for wrong in (("spec.yaml",), ("--jobs", "-")):
        assert flag("estimate", *options[:4], *wrong).code == 2
    assert flag("estimate", "spec.yaml", "--nodes", "2").code == 2
    assert "Qwen/Qwen3-8B" in flag("estimate", "--model", "Qwen/Qwen3-8", "--chip", "H100").err


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [
        ("p99 ttft 1s", {"ttft_s": {"p99": 1.0}}),
        ("tpot_s.mean", None),
        ("TTFT<600ms, p50 tpot 0.05 s", None),
        ("TTFT<600ms,p50 tpot=50ms", {"ttft_s": {"p99": 0.6}, "tpot_s": {"p50": 0.05}}),
        ("p99 1s", None),
    ],
)
def test_latency_limits_are_written_as_they_are_said(limit: str, bounds: dict[str, Any] | None) -> None:
    spec = api.spec_of_model("Qwen/Qwen3-8B", chip="H100", devices=1)
    if bounds is None:
        with pytest.raises(UsageError, match="--slo"):
            api.with_limits(spec, [limit])
    else:
        assert api.with_limits(spec, [limit]).data["serve"]["slo"] == bounds


@pytest.mark.parametrize(
    ("options", "clients"), [(("--tensor-parallel-size", "4"), 64), (("--data-parallel-size", "16"), 256), ((), 16)]
)
def test_the_clients_of_an_imported_command_grow_with_its_devices(
    flag: Flag, options: tuple[str, ...], clients: int
) -> None:
    made = yaml.safe_load(flag("import", "--", "vllm", "serve", "Qwen/Qwen3-30B-A3B", *options).out)
    assert made["serve"]["profile"]["concurrency"] == clients
    named = {"chip": "H100", "devices": clients // 16}
    assert api.spec_of_model("Qwen/Qwen3-8B", **named).data["serve"]["profile"]["concurrency"] == clients


def test_public_models_are_listed_by_words_and_start_a_spec(flag: Flag) -> None:
    [model] = json.loads(flag("models", "deepseek", "V3.2", "--json").out)
    expected = {"layers": 61, "hidden": 7168, "experts": 256, "context": 163840, "weights": "fp8"}
    assert model == {"model": "deepseek-ai/DeepSeek-V3.2", **expected}
    assert flag("models", "no such model", "--json").out.strip() == "[]"
    assert "Qwen/Qwen3-32B" in flag("models", "qwen3-33b").err
    made = flag("init", "--model", "Qwen/Qwen3-8B", "--engine", "vllm", "--chip", "H100")
    assert yaml.safe_load(made.out)["model"] == "Qwen/Qwen3-8B"
