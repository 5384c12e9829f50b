"""Servers on other hosts, as the program of each host (`host.py`) reports them in a file that is mirrored here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagcore.domain.launch import FailurePattern, host_folder
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.trial.failures import TrialFailure
from flagcore.engines.serving.trial.job import Job, log_name
from flagcore.engines.serving.trial.servers import Served

REPORT = "servers.json"
"""The report of a host: its `servers` by number when all are healthy, and the state and text of a `failure`."""
POLL_SECONDS = 0.1


class Remote(Served):
    """An instance on another host. `folder` mirrors the files of that host."""

    def __init__(self, number: int, host: str, folder: Path, patterns: Sequence[FailurePattern]) -> None:
        super().__init__(f"instance {number} on {host}", folder / log_name(number), patterns)
        self.host, self._number, self._report = host, str(number), folder / REPORT

    def wait_until_healthy(self, health: str, deadline: float) -> None:
        """Wait until its host reports it as healthy, and connect to it. Raises TrialFailure."""
        while not (found := self._read("servers").get(self._number)):
            self.check_alive("while it started")
            if time.monotonic() > deadline:
                raise TrialFailure(TrialState.TIMED_OUT, f"{self.name} was not healthy in time")
            time.sleep(POLL_SECONDS)
        self.url, self.startup_s = f"http://{self.host}:{found['port']}", float(found["startup_s"])
        try:
            self.fetch(health)
        except OSError as error:
            reason = f"{self.name} is healthy there, but {self.url} cannot be reached from here: {error}"
            raise TrialFailure(TrialState.FAILED, reason) from None

    def check_alive(self, when: str) -> None:
        """Raise the failure that its host reports."""
        if failure := self._read("failure"):
            raise TrialFailure(TrialState(failure["state"]), str(failure["reason"]))

    def resident_bytes(self) -> int:
        """Return the last sum that its host reported."""
        return int(self._read("servers")[self._number]["resident_bytes"])

    def _read(self, key: str) -> dict[str, Any]:
        """Return a part of the report, empty if there is none. Retries while the report is being written."""
        while True:
            try:
                return dict(json.loads(self._report.read_text("utf-8"))[key])
            except FileNotFoundError:
                return {}
            except ValueError:
                time.sleep(POLL_SECONDS)


def connect(
    job: Job, folder: Path, patterns: Sequence[FailurePattern], health: str, deadline: float
) -> Sequence[Served]:
    """Return the servers of the hosts when all are healthy and can be reached. Raises TrialFailure."""
    servers = [
        Remote(number, job.hosts[each.host], Path(host_folder(str(folder), job.hosts, each.host)), patterns)
        for number, each in enumerate(job.instances)
    ]
    for server in servers:
        server.wait_until_healthy(health, deadline)
    return servers
