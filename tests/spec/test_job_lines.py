"""Lines of a job file: errors name file and line."""

import io

import pytest

from flagcore.errors import SpecError
from flagcore.spec.jobs import read_job_lines

WRONG = {
    "cut short": (b'{"id": "a", ', "cannot be read as JSON"),
    "a list": (b"[1]", "JSON object"),
    "no id": (b"{}", "id must be"),
    "a number for an id": (b'{"id": 1}', "id must be"),
    "a key given twice": (b'{"id": "a", "model": {"x": 1, "x": 2}}', "has the key 'x' twice"),
    "Latin 1": (b'{"id": "\xe9"}', "is not UTF-8 text"),
    "deep": (b'{"id": ' + b"[" * 100_000, "is nested too deep"),
    "many digits": (b'{"id": ' + b"9" * 5000 + b"}", "digits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_without_a_record_is_reported_by_file_and_number_and_the_next_is_read(name: str) -> None:
    line, words = WRONG[name]
    lines = io.BytesIO(b'{"id": "first"}\n\n' + line + b'\n{"id": "last"}')
    first, error, last = read_job_lines(lines, file="some.jsonl")
    assert (first, last) == ({"id": "first"}, {"id": "last"})
    assert isinstance(error, SpecError)
    assert error.key == "some.jsonl: line 3"
    assert words in error.problem


def test_a_byte_order_mark_is_accepted() -> None:
    assert list(read_job_lines(io.BytesIO(b'\xef\xbb\xbf{"id": "a"}\n'), file="x")) == [{"id": "a"}]
