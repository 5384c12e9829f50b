import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flagcore.errors import SpecError
from tests.spec.conftest import read_spec

ErrorOf = Callable[..., SpecError]
GOOD = (
    "model: {num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 1000}\n"
    "train: {engine: toy, seq_length: 128, global_batch_size: 8, precision: bf16}\n"
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)

TEXTS = {
    "empty": (b"", "file", "is empty"),
    "a list": (b"- 1", "the document", "must be a mapping"),
    "another encoding": (GOOD.encode("utf-16"), "file", "is not UTF-8"),
    "a NUL": (b"a: \0", "character 3", "control character"),
    "too large": (b"a: " + b"x" * (1 << 20), "file", "more than 1048576 bytes"),
    "a tab": (b"a:\n\t- 1", "line 2, column 1", "cannot be read as YAML"),
    "two documents": ((GOOD + "---\n" + GOOD).encode(), "line 3, column 1", "single document"),
    "unknown alias": (b"a: *" + b"x" * 9999, "line 1, column 4", "undefined alias"),
    "python object": (b"a: !!python/object/apply:os.system [x]", "line 1, column 4", "the tag"),
    "wrong tag": (b"a: !!int maybe", "the document", "a value is invalid"),
    "duplicate key": ((GOOD + "model: x\n").encode(), "line 3, column 1", "repeated"),
    "itself in a mapping": (b"&a a: &b {c: *b}", "a.c.c", "contains itself"),
    "alias bomb": (BOMB.encode(), "", "more than 100,000 values"),
    "deep lists": (b"a: " + b"[" * 10_000, "line 1", "nesting depth"),
    "5000 digits": (b"a: " + b"9" * 5000, "the document", "a value is invalid"),
    "4000 digits": (b"a: " + b"9" * 4000, "a", "too many digits"),
    "overflow": (b"a: 1e400", "a", "finite"),
    "control character": (b'a: "\\u0007"', "a", "control character"),
    "half a surrogate": (b'a: "\\ud800"', "line 1, column 7", "Unicode"),
    "no character": (b'a: "\\UFFFFFFFF"', "line 1, column 7", "Unicode"),
    "control character in a key": (b'"\\u001b[31m": 1', "the document", "control character"),
    "number as a key": (b"1: 2", "line 1, column 1", "strings"),
    "list as a key": (b"? [1]\n: 2", "line 1, column 3", "strings"),
    "line break in a key": (b'"a\\nb": 1\n' + GOOD.encode(), "['a\\nb']", "not a known key"),
}


@pytest.mark.parametrize(("text", "key", "problem"), TEXTS.values(), ids=TEXTS)
def test_malicious_text_gives_a_one_line_error_quickly(
    tmp_path: Path, error_of: ErrorOf, text: bytes, key: str, problem: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(text)
    started = time.perf_counter()
    error = error_of(read_spec, path)
    assert time.perf_counter() - started < 10
    assert error.key.startswith(key)
    assert problem in error.problem
    assert error.file.endswith("spec.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" ", "is empty"),
        ("[]", "must be a mapping"),
        ('{"a": 1,}', "cannot be read as JSON"),
        ('{"a": NaN}', "finite"),
        ('{"a": 1e999}', "finite"),
        ('{"a": 1, "a": 2}', "has the key 'a' twice"),
        ('{"a": ' * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_malicious_json_gives_a_one_line_error(tmp_path: Path, error_of: ErrorOf, text: str, problem: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text)
    assert problem in error_of(read_spec, path).problem


def test_a_special_file_is_refused_without_waiting(tmp_path: Path, error_of: ErrorOf) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert "not a regular file" in error_of(read_spec, tmp_path / "pipe").problem
    assert "not a regular file" in error_of(read_spec, Path("/dev/zero")).problem
    assert "not a regular file" in error_of(read_spec, tmp_path).problem
    assert "symbolic links" in error_of(read_spec, tmp_path / "loop").problem
    assert "does not exist" in error_of(read_spec, tmp_path / "nowhere").problem
    assert "too long" in error_of(read_spec, Path("x/" * 2500)).problem
    assert "not a path" in error_of(read_spec, Path("a\0b")).problem


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_spec(path).model.num_layers == 4
