"""Watchers get every event, and cost a run nothing."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from flagcore_watchers import webhook

from flagcore import plugins
from flagcore.api.commands.watching import Watchers
from flagcore.domain.trial import RUN_FINISHED, RUN_STARTED, TRIAL_FINISHED, TRIAL_STARTED, RunEvent
from flagcore.errors import NoDevice, SpecError
from tests.product.cli.conftest import Flag, Project

TRIAL = {
    "number": 3,
    "role": "search",
    "state": "measured",
    "reason": None,
    "fidelity": "run",
    "candidate": {"micro_batch_size": 4, "layer_split": None, "sequence_parallel": True},
    "predicted": {"step_time_s": {"value": 0.5}, "time_s": {"compute_s": 0.4}},
    "measured": {"step_time_s": {"median": 0.25, "n": 3}, "tokens_per_second_per_device": 1000.0, "versions": {"a": 1}},
    "duration_s": 7.0,
}
EVENT = RunEvent(
    kind=TRIAL_FINISHED, time=1.8e9, run="own-1f", folder="/x", job={"engine": "e"}, trial=TRIAL, best=TRIAL
)


class Server:
    """A server that keeps what is posted to it; it answers with `status`."""

    def __init__(self, status: int = 204) -> None:
        self.got: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.server.shutdown()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install functions as watchers."""

    def install(**calls: Callable[[RunEvent], None]) -> None:
        monkeypatch.setattr(plugins, "watcher", lambda name: calls[name])

    return install


def send(watchers: Watchers, count: int = 3) -> None:
    """Send events as a run does."""
    watchers._about = {"run": "own-1f", "folder": "/x", "job": {}}
    for _ in range(count):
        watchers._send(kind=TRIAL_FINISHED, trial=TRIAL)


def test_webhook_gets_the_event_as_json(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(webhook.URL, server.url)
    webhook.on_event(EVENT)
    (posted,) = server.got
    assert {name: posted[name] for name in EVENT.as_dict()} == EVENT.as_dict()
    assert "trial 3" in posted["text"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_webhook_that_refuses_is_an_error(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Server(status)
    monkeypatch.setenv(webhook.URL, refusing.url)
    with pytest.raises(OSError):  # noqa: PT011
        webhook.on_event(EVENT)
    assert len(refusing.got) == 1
    refusing.server.shutdown()


def test_events_arrive_in_order_and_a_failing_watcher_gets_the_next(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    got: list[str] = []

    def fail(event: RunEvent) -> None:
        got.append(event.kind)
        raise SystemExit("broken")

    install(fail=fail)
    with caplog.at_level(logging.WARNING, "flagcore"), Watchers(["fail"]) as watchers:
        send(watchers)
    assert got == [TRIAL_FINISHED] * 3 + [RUN_FINISHED]
    assert len(caplog.records) == 1


def test_slow_watcher_neither_delays_events_nor_the_others(install: Callable[..., None]) -> None:
    forever, got = Event(), list[str]()
    install(slow=lambda event: forever.wait(60) and None, quick=lambda event: got.append(event.kind))
    began = time.monotonic()
    with Watchers(["slow", "quick"], max_seconds=0.2) as watchers:
        send(watchers)
        sent = time.monotonic() - began
        time.sleep(0.3)
        send(watchers, 1)
    assert sent < 0.2
    assert time.monotonic() - began < 5.0
    assert got == [TRIAL_FINISHED] * 4 + [RUN_FINISHED]
    forever.set()


def test_secrets_are_left_out(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-mine")
    got: list[RunEvent] = []
    install(keep=got.append)
    with Watchers(["keep"]) as watchers:
        watchers._secrets = ["a-secret-of-mine"]
        watchers._about = {"run": "own-1f", "folder": "/x", "job": {}}
        watchers._send(kind=TRIAL_FINISHED, trial={**TRIAL, "reason": "token a-secret-of-mine is refused"})
    assert "a-secret-of-mine" not in json.dumps([each.as_dict() for each in got])


def test_unknown_and_broken_watchers_are_errors_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError) as unknown:
        Watchers(["webhok"])
    assert unknown.value.fix == "did you mean webhook?"
    monkeypatch.setattr("flagcore.plugins.entry_points.load_only", lambda points: object())
    with pytest.raises(NoDevice):
        Watchers(["webhook"])


@pytest.mark.slow
def test_tune_sends_all_events(server: Server, project: Project, flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(webhook.URL, server.url)
    spec = project.spec(control={"max_trials": 2, "repeats": 0})
    flag("tune", spec, *("--run-dir", str(project.run_dir), "--watch", "webhook")).worked()
    kinds = [each["kind"] for each in server.got]
    assert kinds == [RUN_STARTED, *([TRIAL_STARTED, TRIAL_FINISHED] * 2), RUN_FINISHED]
    result = project.result()
    assert server.got[-1]["result"]["best"] == result["best"]
    assert [each["trial"] for each in server.got if each["kind"] == TRIAL_FINISHED] == result["trials"]
