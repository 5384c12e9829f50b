"""The highest rate of a search, compared with a scan of rates by a client that shares no code with flagcore's, and
loads that do not end in their time.
"""

import contextlib
import http.client
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_serving.job import Load
from flagcore_serving.launch.server import read_job
from flagcore_serving.load.result import Progress
from flagcore_serving.trial.__main__ import running_servers
from flagcore_serving.trial.time_left import Limit, fewest_answers

from engines.serving.tests.engines.starting import tiny_model
from engines.serving.tests.trial import trials
from flagcore.contracts import Platform
from tests.product.spec.test_serving import serve

LIMIT_S, INPUTS, OUTPUTS, SCANNED_S = 0.5, 8, 8, 20.0
RATIO = 1.1
"""A rate that is lower by this ratio meets the limit in one of two scans, one that is higher exceeds it in one."""


def first_token_s(address: str, prompt: list[int]) -> float:
    """Seconds until the first token of one answer arrives."""
    body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUTS, "ignore_eos": True, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(address, timeout=300)
    start = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer, first = connection.getresponse(), 0.0
        assert answer.status == 200
        for line in answer:
            text = line.decode().removeprefix("data: ").strip()
            choices = json.loads(text).get("choices") if text.startswith("{") else None
            if choices and not first:  # the text of a token may be empty
                first = time.perf_counter() - start
    finally:
        connection.close()
    assert first
    return first


def p90_at(address: str, rate: float) -> float:
    """The p90 of the time to the first token over SCANNED_S of Poisson arrivals."""
    draw, found, threads = random.Random(), list[float](), list[threading.Thread]()
    start = due = time.perf_counter()
    while (due := due + draw.expovariate(rate)) < start + SCANNED_S:
        prompt = [draw.randrange(100, 500) for _ in range(INPUTS)]
        time.sleep(max(0.0, due - time.perf_counter()))
        threads.append(threading.Thread(target=lambda: found.append(first_token_s(address, prompt))))  # noqa: B023
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    return sorted(found)[round(0.9 * (len(found) - 1))]


@contextlib.contextmanager
def served(platform: Platform, folder: Path, **values: Any) -> Iterator[str]:
    """Start the server of a candidate, and yield its address."""
    LLAMACPP.launch(platform, trials.candidate(platform, **values), str(trials.trial_folder(folder)))
    job, place = read_job(trials.trial_folder(folder)), trials.trial_folder(folder)
    with running_servers(job, LLAMACPP.reports, place, time.monotonic() + 60.0) as servers:
        yield urlsplit(servers[0].url).netloc


@pytest.mark.long
@pytest.mark.skipif("SCAN" not in os.environ, reason="wants a quiet machine: SCAN=1")
@pytest.mark.parametrize("is_real", [False, True], ids=["known-limit", "llama.cpp"])
def test_the_highest_rate_agrees_with_a_scan(is_real: bool, tmp_path: Path) -> None:
    job = serve({"input_len": INPUTS, "output_len": OUTPUTS, "request_rate": "auto"}, slo={"ttft_s": {"p90": LIMIT_S}})
    given: dict[str, Any] = {"loads": job.loads, "highest": job.highest, "slo": job.slo}
    if is_real:
        pytest.importorskip("xllamacpp", reason="pip install 'flagcore[llamacpp]' for a real server")
        given |= {"command": None, "weights": tiny_model(tmp_path, {})}
    platform = trials.platform(tmp_path, "queues", seconds=900.0, **given)
    trial = trials.run_here(platform, tmp_path, parallel=4)
    assert trial.measurement is not None, trial.reason
    found = trial.measurement.highest
    assert found is not None
    assert found.met is not None
    assert found.untested is None
    with served(platform, tmp_path, parallel=4) as address:
        assert any(p90_at(address, found.met / RATIO) <= LIMIT_S for _ in range(2))
        assert any(p90_at(address, found.met * RATIO) > LIMIT_S for _ in range(2))
    if not is_real:  # four slots of 0.1 s
        assert found.met <= 41.0


LOAD = Load(input_len=32, output_len=64, num_prompts=32, concurrency=16)
SLOW = Progress(answered=3, requests=32, seconds=31.0, each_s=29.0, all_s=310.0, has_tokens=True)


def limit(folder: Path, because: str, seconds: float = 100.0, start_s: float = 7.0) -> Limit:
    (folder / "launch.json").write_text(json.dumps({"timeout_because": because}))
    return Limit.of(folder, seconds, start_s)


@pytest.mark.parametrize(
    ("because", "seconds", "setting"),
    [
        ("auto_tuner.control.max_time_per_task = 100 s", 100.0, "auto_tuner.control.max_time_per_task: 400"),
        ("the rest of auto_tuner.control.max_time = 210 s", 100.0, "auto_tuner.control.max_time: 510"),
        ("1200 s to start", 100.0, "auto_tuner.control.max_time_per_task: 400"),
    ],
)
def test_the_setting_for_the_time_limit_is_computed(because: str, seconds: float, setting: str, tmp_path: Path) -> None:
    text = limit(tmp_path, because, seconds).short_of_time(SLOW, "the load", [LOAD], 88.0, 2.1)
    assert f"set {setting} or serve.profile.num_prompts: 7" in text
    for part in ("3 of 32", "29 s each", "predicted 2.1 s", "~310 s of 88 s"):
        assert part in text
    assert len(text) < 250


def test_later_loads_need_time_too(tmp_path: Path) -> None:
    assert "~620 s of 88 s" in limit(tmp_path, "").short_of_time(SLOW, "load 1 of 2", [LOAD, LOAD], 88.0, None)


def test_a_start_that_took_most_of_the_time_is_named(tmp_path: Path) -> None:
    late = limit(tmp_path, "", start_s=80.0)
    assert "the start took 80 s of 100 s" in late.no_time("warm-up")
    assert "the start took 80 s of 100 s" in late.short_of_time(SLOW, "the load", [LOAD], 8.0, None)
    assert "the start" not in limit(tmp_path, "").no_time("warm-up")


def test_a_server_that_sent_nothing_gets_no_advice(tmp_path: Path) -> None:
    silent = Progress(answered=0, requests=32, seconds=88.0, each_s=None, all_s=None, has_tokens=False)
    text = limit(tmp_path, "").short_of_time(silent, "the load", [LOAD], 88.0, 2.1)
    assert "none of 32" in text
    assert "no token arrived" in text
    assert "set " not in text


def test_a_trial_without_a_launch_has_a_limit(tmp_path: Path) -> None:
    assert Limit.of(tmp_path, 60.0, 1.0).value_s == 60.0


@pytest.mark.parametrize(
    ("load", "fewest"),
    [
        (LOAD, 16),
        (Load(concurrency=2), 8),
        (Load(request_rate=4.0), 8),
        (Load(request_rate=math.inf, num_prompts=100), 100),
    ],
)
def test_every_request_in_flight_ends_once_in_a_load_that_is_cut(load: Load, fewest: int) -> None:
    assert fewest_answers(load) == fewest
