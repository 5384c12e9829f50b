"""Whatever is wrong with the input: the exit code that is promised, one clear message, no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.product.cli.conftest import Flag, Project, Ran
from tests.product.cli.test_estimate import JOB
from tests.product.tasks import SHAPE


def refused(ran: Ran, code: int, *words: str) -> None:
    """Assert one line on stderr with all of `words`, nothing on stdout, and the exit code."""
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    (line,) = ran.err.strip().splitlines()
    assert line.startswith("flag: ")
    assert len(line) < 6000
    for word in words:
        assert word in line


def test_a_file_that_is_not_a_spec(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_bytes(bytes(range(256)))  # tests/spec has other contents
    for command in ("tune", "estimate", "explain"):
        refused(flag(command, str(tmp_path / "spec.yaml")), 2, "not UTF-8", "spec.yaml")
    assert os.listdir(tmp_path) == ["spec.yaml"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    refused(flag("estimate", str(tmp_path / "config.json")), 2, "--model")


@pytest.mark.parametrize(
    ("tuner", "code", "words"),  # tests/spec has other errors of code 2
    [
        ({"baseline": {"tensor_model_parallel_size": 3, "data_parallel_size": 3}}, 2, ("attention_heads", "devices")),
        ({"space": {"meshes": ["cpu dp2"]}}, 2, ("auto_tuner.space.meshes",)),
        ({"space": {"tensor_model_parallel_size": 3}}, 3, ("no legal candidate", "attention_heads")),
    ],
)
def test_an_invalid_spec(
    tuner: dict[str, Any], code: int, words: tuple[str, ...], flag: Flag, project: Project
) -> None:
    spec = project.spec(auto_tuner=tuner)
    for command in ("estimate", "tune"):
        refused(flag(command, spec), code, *words)
    assert not (project.folder / "runs").exists()


@pytest.mark.parametrize("make", [Path.exists, os.mkdir, os.mkfifo])
def test_a_path_that_is_not_a_file(make: Callable[[Path], object], flag: Flag, tmp_path: Path) -> None:
    make(tmp_path / "path")
    for command in (("estimate",), ("tune",), ("run",), *([("estimate", "--jobs")] if make != os.mkfifo else [])):
        refused(flag(*command, str(tmp_path / "path")), 2)


@pytest.mark.parametrize("content", ["", "{}", '{"argv": [], "environment": {}, "directory": "/"}'])
def test_a_run_with_a_modified_best(content: str, flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "launch.json").write_text(content)
    refused(flag("run", str(tmp_path)), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("tune",),
        ("estimate", "a.yaml", "--jobs", "b.jsonl"),
        ("estimate", "a.yaml", "--top", "0"),
        ("tune", "a.yaml", "--nosuch"),
        ("plugins", "nosuch"),
    ],
)
def test_wrong_usage_shows_the_usage(arguments: tuple[str, ...], flag: Flag) -> None:
    completed = flag(*arguments)
    assert completed.code == 2
    assert completed.out == ""
    assert completed.err.startswith("Usage: flag")
    assert "Traceback" not in completed.err


RECORDS: dict[str, tuple[Any, str]] = {
    "an id that is no number": ('{"id": NaN}', "invalid"),
    "an id of half a character": ({**JOB, "id": "\ud800"}, "invalid"),
    "uneven nodes": ({**JOB, "cluster": {"chip": "cpu", "devices": 3, "devices_per_node": 2}}, "invalid"),
    "long": (json.dumps({**JOB, "note": "x" * (5 << 20)}), "ok"),
    "huge sizes": (
        {
            **JOB,
            "candidate": {},
            "model": {**SHAPE, "hidden_size": 2**30, "ffn_hidden_size": 2**31, "num_layers": 10_000},
            "train": {"seq_length": 2**31, "global_batch_size": 2**31, "precision": "fp32"},
        },
        "ok",
    ),
}


def test_each_bad_job_record_is_reported(flag: Flag, tmp_path: Path) -> None:
    lines = [record if isinstance(record, str) else json.dumps(record) for record, _ in RECORDS.values()]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines) + "\n")
    completed = flag("estimate", "--jobs", str(tmp_path / "jobs.jsonl"), "--format", "jsonl").worked()
    answers = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in completed.out.splitlines()]
    assert [answer["status"] for answer in answers] == [status for _, status in RECORDS.values()]
    assert all(len(answer.get("reason", "")) < 500 for answer in answers)
    assert all("\n" not in answer.get("reason", "") for answer in answers)
    assert "Traceback" not in completed.err
