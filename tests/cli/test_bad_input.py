"""Whatever is wrong with the input: the exit code that is promised, one clear message, no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Flag, Project, Ran
from tests.small import SHAPE


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


FILES: dict[str, tuple[bytes, str]] = {  # tests/spec has more of them
    "empty": (b"", "is empty"),
    "binary": (bytes(range(256)), "not UTF-8"),
    "deep": (b"model: " + b"[" * 2_000, "nested too deep"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_a_spec(name: str, flag: Flag, tmp_path: Path) -> None:
    content, words = FILES[name]
    (tmp_path / "spec.yaml").write_bytes(content)
    for command in ("tune", "estimate", "explain"):
        refused(flag(command, str(tmp_path / "spec.yaml")), 2, words, "spec.yaml")
    assert os.listdir(tmp_path) == ["spec.yaml"]


SECTIONS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {  # tests/spec has more of them
    "unknown key": ({"train": {"seq_len": 1}}, 2, ("train.seq_len", "seq_length")),
    "a baseline that breaks two rules": (
        {"auto_tuner": {"baseline": {"tensor_model_parallel_size": 3, "data_parallel_size": 3}}},
        2,
        ("num_attention_heads", "number of devices"),
    ),
    "an unknown strategy": ({"auto_tuner": {"strategy": "magic"}}, 2, ("strategy", "magic", "learned")),
    "an unknown chip": ({"cluster": {"chip": "unobtainium"}}, 4, ("unobtainium", "flag plugins chips")),
    "nothing legal": (
        {"auto_tuner": {"space": {"tensor_model_parallel_size": 3}}},
        3,
        ("no legal candidate", "attention_heads"),
    ),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_an_invalid_spec(name: str, flag: Flag, project: Project) -> None:
    sections, code, words = SECTIONS[name]
    spec = project.spec(**sections)
    for command in ("estimate", "tune"):
        refused(flag(command, spec), code, *words)
    assert not (project.folder / "runs").exists()


PATHS: dict[str, Callable[[Path], str]] = {  # tests/spec has more of them
    "missing": lambda folder: str(folder / "nowhere.yaml"),
    "a folder": lambda folder: str(folder),
    "a pipe": lambda folder: os.mkfifo(folder / "pipe") or str(folder / "pipe"),
    "empty": lambda folder: "",
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_not_a_file(name: str, flag: Flag, tmp_path: Path) -> None:
    path = PATHS[name](tmp_path)
    refused(flag("estimate", path), 2)
    refused(flag("tune", path), 2)
    refused(flag("run", path), 2, "is not a run")
    refused(flag("estimate", "--jobs", path) if name != "a pipe" else flag("run", path), 2)


@pytest.mark.parametrize("where", ["file", "/proc/flagcore", "x" * 300])
def test_a_run_folder_that_cannot_be_written(where: str, flag: Flag, project: Project) -> None:
    (project.folder / "file").touch()
    refused(flag("tune", project.spec(), "--run-dir", where), 2, "cannot be")


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
        ("estimate", "a.yaml", "--format", "xml"),
        ("tune", "a.yaml", "b.yaml"),
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


JOB = {
    "id": "a",
    "kind": "train",
    "model": SHAPE,
    "cluster": {"chip": "cpu", "devices": 2, "devices_per_node": 2},
    "train": {"seq_length": 128, "global_batch_size": 8, "precision": "bf16"},
    "candidate": {"tensor_model_parallel_size": 2},
}
RECORDS: dict[str, tuple[Any, str]] = {
    "good": (JOB, "ok"),
    "illegal": ({**JOB, "candidate": {"tensor_model_parallel_size": 3}}, "invalid"),
    "not JSON": ("{", "invalid"),
    "null": (None, "invalid"),
    "an id that is no number": ('{"id": NaN}', "invalid"),
    "an id of half a character": ({**JOB, "id": "\ud800"}, "invalid"),
    "an unknown kind": ({**JOB, "kind": "bake"}, "invalid"),
    "a server without a load": ({**JOB, "kind": "serve"}, "invalid"),
    "an unknown chip": ({**JOB, "cluster": {**JOB["cluster"], "chip": "x"}}, "unknown"),  # type: ignore[dict-item]
    "uneven nodes": ({**JOB, "cluster": {"chip": "cpu", "devices": 3, "devices_per_node": 2}}, "invalid"),
    "an unknown schedule": ({**JOB, "candidate": {"pipeline_schedule": "zigzag"}}, "unknown"),
    "long": (json.dumps({**JOB, "note": "x" * (5 << 20)}), "ok"),
    "huge sizes": (
        {
            **JOB,
            "model": {**JOB["model"], "hidden_size": 2**30, "ffn_hidden_size": 2**31, "num_layers": 10_000},  # type: ignore[dict-item]
            "train": {"seq_length": 2**31, "global_batch_size": 2**31, "precision": "fp32"},
        },
        "ok",
    ),
}


def test_each_bad_job_record_is_reported(flag: Flag, tmp_path: Path) -> None:
    lines = [record if isinstance(record, str) else json.dumps(record) for record, _ in RECORDS.values()]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines) + "\n")
    completed = flag("estimate", "--jobs", str(tmp_path / "jobs.jsonl"), "--format", "jsonl")
    assert completed.code == 0, completed.err
    answers = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in completed.out.splitlines()]
    assert [answer["status"] for answer in answers] == [status for _, status in RECORDS.values()]
    assert all(len(answer.get("reason", "")) < 500 for answer in answers)
    assert all("\n" not in answer.get("reason", "") for answer in answers)
    assert "Traceback" not in completed.err
