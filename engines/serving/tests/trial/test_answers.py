"""Answers of servers: how they are read, and which differ by more than the engine's own noise."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.result import Target
from flagcore_serving.trial.answers import (
    ALONE,
    FILE,
    LEAST,
    LEAST_TOGETHER,
    PROMPTS,
    TOKENS,
    ask,
    compared,
    divergence,
    read_answer,
)

from flagcore.errors import FlagError
from tests import tasks

LIKELY = {" a": -1.0, " b": -1.1, " c": -3.0}


def answer(*values: float, last: str = " a") -> list[Any]:
    return [[" a" if place < len(values) - 1 else last, value, LIKELY] for place, value in enumerate(values)]


def test_both_forms_of_log_probabilities_are_read() -> None:
    token = {"token": " a", "logprob": -1.0, "top_logprobs": [{"token": " a", "logprob": -1.0}]}
    of_llamacpp = {"content": [token]}
    of_openai = {"tokens": [" a"], "token_logprobs": [-1.0], "top_logprobs": [{" a": -1.0}]}
    for form in (of_llamacpp, of_openai):
        assert read_answer(json.dumps({"choices": [{"logprobs": form}]}).encode()) == [(" a", -1.0, {" a": -1.0})]


@pytest.mark.parametrize(
    ("own", "difference", "equal"),
    [
        (answer(-1.0, -1.0), 0.0, 2.0),
        (answer(-1.2, -1.0), 0.1, 2.0),
        (answer(-1.0, -1.0, last=" b"), 0.05, 1.0),  # the base's own second choice, less likely by 0.1
        (answer(-1.0, -1.0, last=" x"), 1.0, 1.0),  # not among the likely ones: at least as far as the last of them
    ],
)
def test_the_divergence_ends_with_the_first_other_token(own: Any, difference: float, equal: float) -> None:
    found = divergence([own], [answer(-1.0, -1.0), answer(-1.0)])
    assert found == (pytest.approx(difference), equal, 1)


def stored(folder: Path, **answers: Any) -> str:
    folder.mkdir()
    (folder / FILE).write_text(json.dumps(answers))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "value", "alone", "is_same"),
    [
        ("rounding", -1.01, -1.0, True),
        ("rounding", -1.03, -1.0, False),
        ("rounding", -1.03, -1.01, True),  # the engine's own noise between batch sizes is larger
        ("changes", -1.03, -1.0, True),
        ("changes", -1.06, -1.0, False),
    ],
)
def test_answers_differ_by_more_than_noise_or_the_limit(
    tmp_path: Path, change: str, value: float, alone: float, is_same: bool
) -> None:
    base = stored(tmp_path / "0", at_once=[answer(-1.0)], alone=[answer(alone)])
    found = compared(tasks.task(), change, stored(tmp_path / "1", at_once=[answer(value)]), base)
    assert found is not None
    assert (found.difference <= found.limit) == is_same


def test_knobs_that_change_answers_need_a_comparison(tmp_path: Path) -> None:
    base = stored(tmp_path / "0", at_once=[answer(-1.0)], alone=[answer(-1.0)])
    silent = stored(tmp_path / "1", problem="HTTP 400: no logprobs")
    assert compared(tasks.task(), "rounding", silent, base) is None
    assert compared(tasks.task(), "same", base, base) is None
    with pytest.raises(FlagError, match="HTTP 400"):
        compared(tasks.task(), "changes", silent, base)


class Handler(BaseHTTPRequestHandler):
    seconds = 0.0

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        count = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        found = {"tokens": ["a"] * count, "token_logprobs": [-1.0] * count, "top_logprobs": [{"a": -1.0}] * count}
        body = json.dumps({"choices": [{"logprobs": found}]}).encode()
        time.sleep(self.seconds)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Target(url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


LOADS: tuple[dict[str, Any], ...] = (
    {"num_prompts": 8, "concurrency": 4, "output_len": 2},
    {"num_prompts": 100, "request_rate": 2.0},
    {"num_prompts": 8, "concurrency": 4, "turns": 3, "think_time_s": 1.0, "adapters": 3, "prefix_len": 4},
)


@pytest.mark.parametrize("load", LOADS)
def test_prompts_of_any_load_are_asked(target: Target, load: dict[str, Any]) -> None:
    found = ask([target], "m", Load(**{"input_len": 16, "output_len": 20, **load}), 1000, 30.0, 60.0)
    assert (len(found["at_once"]), len(found["alone"])) == (PROMPTS, ALONE)
    assert {len(each) for each in found["at_once"]} == {min(TOKENS, load.get("output_len", TOKENS))}


def test_prompts_of_a_file_are_asked(target: Target, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "hello", "output_length": 4}\n' * 3)
    found = ask([target], "m", Load(trace=str(tmp_path / "own.jsonl"), concurrency=2), 1000, 30.0, 60.0)
    assert [len(each) for each in found["at_once"]] == [4] * 3
    assert "problem" in ask([], "m", Load(input_len=4, output_len=4, num_prompts=1), 1000, 30.0, 60.0)


@pytest.mark.slow
def test_a_short_trial_of_a_slow_server_has_few_prompts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(input_len=4, output_len=4, num_prompts=8, concurrency=8)
    monkeypatch.setattr(Handler, "seconds", 0.3)
    found = ask([target], "m", load, 1000, 1.2, 60.0)
    assert len(found["alone"]) == 1
    assert LEAST_TOGETHER <= len(found["at_once"]) < PROMPTS
    few = ask([target], "m", load, 1000, 0.01, 60.0)
    assert (len(few["alone"]), len(few["at_once"])) == (1, LEAST_TOGETHER)
    few = ask([target], "m", Load(input_len=4, output_len=4, num_prompts=8, concurrency=1), 1000, 0.01, 60.0)
    assert len(few["at_once"]) == LEAST
    assert "problem" in ask([target], "m", load, 1000, 0.01, 0.1)
