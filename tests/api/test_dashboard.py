"""The dashboard: what it shows, and what an attacker does not get from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, urlsplit

import optuna
import psutil
import pytest

from flagcore import api
from flagcore.api.managing.dashboard import dashboard
from flagcore.domain.candidate import Candidate
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.errors import UsageError
from flagcore.tuner.store.directory import RunDirectory
from flagcore.tuner.store.trials import JOURNAL, OptunaStore
from tests.cli.conftest import Project

HOSTILE = "<script>alert(1)</script>\"'&"
SECRET = "what-is-outside-of-the-folder"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Client:
    """A browser of the user, with the cookie of the dashboard."""

    port: int
    token: str

    @property
    def cookie(self) -> str:
        return self.get(f"/?token={self.token}", Cookie="").headers["set-cookie"].split(";")[0]

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if "Cookie" not in sent:
            sent["Cookie"] = self.cookie
        connection.putrequest(method, path, skip_host="Host" in sent)
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders()
        response: HTTPResponse = connection.getresponse()
        body = response.read().decode("utf-8", "replace")
        connection.close()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folder `runs` and a file that no request may read."""
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def root(outside: Path) -> Path:
    """An estimate, a run whose name and logs are hostile, and runs with links out of the folder."""
    runs = outside / "runs"
    project_folder = outside / "project"
    project_folder.mkdir()
    project = Project(project_folder)
    api.tune(project.spec(control={"max_trials": 4}), run_dir=runs / "team" / "estimate", fidelity="estimate")
    hostile = runs / HOSTILE.replace("/", "_")
    store = make_run(hostile, trials=0)
    trial = store.begin(a_trial(TrialState.RUNNING))
    (hostile / trial.log).write_text(HOSTILE)
    store.finish(Trial(**{**fields(trial), "state": TrialState.FAILED, "reason": HOSTILE}))
    for name, linked in (("spec", "spec.yaml"), ("script", "best.sh"), ("result", "result.json")):
        shutil.copytree(runs / "team" / "estimate", runs / f"link-{name}")
        (runs / f"link-{name}" / linked).unlink(missing_ok=True)
        (runs / f"link-{name}" / linked).symlink_to(outside / "secret.txt")
    (outside / "elsewhere").mkdir()
    shutil.copytree(runs / "team" / "estimate", outside / "elsewhere" / "run")
    (runs / "linked").symlink_to(outside / "elsewhere")
    return runs


def fields(trial: Trial) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in trial.__dataclass_fields__}


def a_trial(state: TrialState) -> Trial:
    return Trial(number=0, candidate=Candidate.of({"micro_batch_size": 1}), role=Role.SEARCH, state=state)


def make_run(folder: Path, trials: int) -> OptunaStore:
    directory = RunDirectory(folder)
    directory.open()
    name = directory.claim({"spec": {}}, {"baseline": {}, "storage": None})
    store = OptunaStore(folder, {"micro_batch_size": (1, 2)}, run=name)
    directory.close()
    return store


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with serving(root) as found:
        yield found


class serving:
    def __init__(self, root: Path) -> None:
        self.server = dashboard(root)

    def __enter__(self) -> Client:
        self.thread = Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        url = urlsplit(self.server.url)
        assert url.port
        return Client(url.port, url.query.removeprefix("token="))

    def __exit__(self, *error: object) -> None:
        self.server.server.trigger.pull_trigger(self.server.close)  # in the thread that uses the sockets
        self.thread.join(10)


def test_overview_lists_runs_with_links_to_reports_and_studies(client: Client) -> None:
    page = client.get("/")
    assert page.status == 200
    assert '<a href="/runs/team/estimate">' in page.text
    assert re.search(r'http-equiv="refresh" content="\d+"', page.text)
    studies = json.loads(client.get("/api/studies").text)["study_summaries"]
    assert "team/estimate" in {each["study_name"] for each in studies}
    assert all(f'"/dashboard/studies/{each["study_id"]}"' in page.text for each in studies)


def test_report_is_that_of_the_run_and_cannot_reach_other_pages(client: Client, root: Path) -> None:
    page = client.get("/runs/team/estimate")
    assert page.status == 200
    assert page.text == api.report(root / "team" / "estimate").replace("estimate", "estimate")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("sandbox ")
    assert "allow-same-origin" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("cookie", ["", "flagcore-00000000=wrong", "=", 'a;;b="', "flagcore="])
@pytest.mark.parametrize("path", ["/", "/runs/team/estimate", "/dashboard", "/api/studies", "/static/bundle.js", "/x"])
def test_nothing_without_the_token(client: Client, path: str, cookie: str) -> None:
    refused = client.get(path, Cookie=cookie)
    assert refused.status == 403
    assert "set-cookie" not in refused.headers


@pytest.mark.parametrize("token", ["", "wrong", "%00", "é", "a" * 4000])
def test_wrong_token_gets_no_cookie(client: Client, token: str) -> None:
    refused = client.get(f"/?token={quote(token)}", Cookie="")
    assert refused.status == 403
    assert "set-cookie" not in refused.headers


def test_token_is_removed_from_the_url_and_kept_from_scripts_and_other_sites(client: Client) -> None:
    answer = client.get(f"/runs/team/estimate?a=1&token={client.token}", Cookie="")
    assert answer.status == 303
    assert answer.headers["location"] == "/runs/team/estimate?a=1"
    assert {"HttpOnly", "SameSite=Strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "/%0d%0aSet-Cookie:%20a=b"])
def test_redirect_stays_on_the_dashboard(client: Client, path: str) -> None:
    answer = client.get(f"{path}?token={client.token}", Cookie="")
    if answer.status == 303:
        location = answer.headers["location"]
        assert location.startswith("/")
        assert not location.startswith(("//", "/\\"))
        assert answer.headers["set-cookie"].startswith("flagcore-")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil", "["),
        *("evil@127.0.0.1", "127.0.0.1#@evil.example", "127.0.0.1:80:80", "127.0.0.1/", "localhost."),
    ],
)
def test_foreign_host_is_refused_also_with_the_cookie(client: Client, host: str) -> None:
    assert client.get("/api/studies", Host=host).status == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", ""])
def test_foreign_origin_is_refused_also_with_the_cookie(client: Client, origin: str) -> None:
    assert client.get("/api/studies", Origin=origin).status == 403


def test_own_origin_and_forwarded_ports_are_served(client: Client) -> None:
    assert client.get("/api/studies", Origin=f"http://127.0.0.1:{client.port}").status == 200
    assert client.get("/api/studies", Host="localhost:9", Origin="http://localhost:9").status == 200
    assert client.get("/api/studies", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/api/studies", "/api/studies/0", "/"])
def test_nothing_can_be_changed(client: Client, root: Path, method: str, path: str) -> None:
    before = (root / "team" / "estimate" / JOURNAL).read_bytes()
    assert client.get(path, method).status == 405
    assert (root / "team" / "estimate" / JOURNAL).read_bytes() == before


@pytest.mark.parametrize("start", ["/runs/", "/static/", "/dashboard/", "/artifacts/", "/"])
@pytest.mark.parametrize(
    "path",
    [
        *("../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "..%252fsecret.txt", "..\\secret.txt"),
        *("team/../../secret.txt", "team/estimate/../../../secret.txt", "team/estimate/%00", "../../../../etc/passwd"),
        *("team/estimate/result.json", "team/estimate/journal.log", "link-spec/spec.yaml", "linked/run"),
    ],
)
def test_no_path_leads_to_a_file(client: Client, start: str, path: str) -> None:
    answer = client.get(start + path)
    assert SECRET not in answer.text
    assert "root:" not in answer.text
    assert answer.status in (400, 403, 404) or (start == "/dashboard/" and '<div id="dashboard">' in answer.text)


@pytest.mark.parametrize("run", ["link-spec", "link-script", "link-result"])
def test_links_out_of_the_folder_are_not_followed(client: Client, run: str) -> None:
    answer = client.get(f"/runs/{run}")
    assert answer.status == 403
    assert SECRET not in answer.text
    assert SECRET not in client.get("/").text


def test_a_pipe_as_journal_is_not_waited_for(tmp_path: Path) -> None:
    make_run(tmp_path / "run", trials=0)
    (tmp_path / "run" / JOURNAL).unlink()
    os.mkfifo(tmp_path / "run" / JOURNAL)
    with serving(tmp_path) as client:
        assert "cannot be read" in client.get("/").text
        assert client.get("/runs/run").status == 409


def test_a_name_that_is_not_utf_8_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / os.fsdecode(b"caf\xe9"), trials=0)
    with serving(tmp_path) as client:
        assert "/runs/caf%E9" in client.get("/").text
        assert client.get("/runs/caf%E9").status != 404


def test_linked_folders_are_not_listed(client: Client) -> None:
    assert "linked/" not in client.get("/").text


def test_names_and_reasons_of_others_stay_text(client: Client) -> None:
    page = client.get("/").text
    assert HOSTILE.replace("/", "_") not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "script-src" not in client.get("/").headers["content-security-policy"]  # default-src 'none': no script runs
    studies = client.get("/api/studies")
    assert studies.headers["content-type"].startswith("application/json")
    assert studies.headers["x-content-type-options"] == "nosniff"
    error = client.get("/runs/" + quote(HOSTILE))
    assert error.headers["content-type"].startswith("text/plain")


def test_listens_on_loopback_only(client: Client) -> None:
    listening = [
        each.laddr
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == client.port
    ]
    assert [each.ip for each in listening] == ["127.0.0.1"]
    for family, address in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as other, pytest.raises(OSError):  # noqa: PT011
            other.connect((address, client.port))


def test_running_trials_are_shown_while_another_process_runs_them(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "live")
    directory.open()
    try:
        spec = {"train": {"engine": "megatron"}, "auto_tuner": {"control": {"max_trials": 7}}}
        name = directory.claim({"spec": spec}, {"baseline": {}, "storage": None})
        store = OptunaStore(directory.path, {"micro_batch_size": (1, 2)}, run=name)
        store.begin(a_trial(TrialState.RUNNING))
        with serving(tmp_path / "runs") as client:
            page = client.get("/").text
            assert re.search(r"<td>running", page)
            assert "trial 0: MBS 1" in page
            assert "0 / 7" in page
            trials = json.loads(client.get("/api/studies/0").text)["trials"]
            assert [each["state"] for each in trials] == ["Running"]
            assert directory.holder() == (os.getpid(), os.uname().nodename)
            directory.close()
            assert directory.holder() is None
            assert re.search(r"<td>interrupted", client.get("/").text)
    finally:
        directory.close()


def test_run_of_another_host_is_shown_as_its(tmp_path: Path) -> None:
    make_run(tmp_path / "slurm", trials=0).begin(a_trial(TrialState.RUNNING))
    (tmp_path / "slurm" / "run.lock").write_text("process 7 on node-17 since Mon")
    with serving(tmp_path) as client:
        assert "node-17" in client.get("/").text


@pytest.mark.slow
def test_5000_trials_stay_usable(tmp_path: Path) -> None:
    store = make_run(tmp_path / "big", trials=0)
    store.begin(a_trial(TrialState.RUNNING))
    file = tmp_path / "big" / JOURNAL
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    create = json.dumps(next(line for line in lines if line["op_code"] == 4))
    with file.open("a") as journal:
        journal.write(f"{create}\n" * 4999)
    with serving(tmp_path) as client:
        client.get("/")
        client.get("/api/studies/0")
        before = time.process_time()
        assert len(json.loads(client.get("/api/studies/0?after=4990").text)["trials"]) == 10
        assert client.get("/").status == 200
        assert time.process_time() - before < 3.0  # 0.5 s measured; reading the journal again takes longer


def test_missing_folder_and_used_port_are_usage_errors(client: Client, root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        dashboard(tmp_path / "missing")
    with pytest.raises(UsageError):
        dashboard(root, port=client.port)


def test_optuna_cannot_write_to_the_studies(root: Path) -> None:
    from flagcore.tuner.store.studies import Studies

    study = optuna.load_study(study_name="team/estimate", storage=Studies(root))
    with pytest.raises(RuntimeError):
        study.enqueue_trial({})
    with pytest.raises(RuntimeError):
        optuna.delete_study(study_name="team/estimate", storage=Studies(root))
