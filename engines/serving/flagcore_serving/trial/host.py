"""Entry point: `python -m flagcore_serving.trial.host FOLDER NUMBER PORTS`.

Starts the servers that FOLDER/serve.json assigns to the host with the index NUMBER, and keeps them running until this
program is ended. PORTS: a free port of each host, separated by commas. FOLDER/servers.json reports the servers to the
client (`servers.py`). If a server ends, this program ends as the trial program would: with the same exit code and the
same last line on stderr.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from flagcore_serving.launch.reports import ServerReports
from flagcore_serving.launch.server import TrialJob, log_name, read_job
from flagcore_serving.trial.failures import TrialFailure, end_seconds, report
from flagcore_serving.trial.servers import REPORT, Server, check_all_alive, start_all, stop_all

PERIOD_SECONDS = 1.0
CHECK_SECONDS = 0.1


def main(folder: Path, number: int, ports: Sequence[str]) -> int:
    """Serve until this program is ended or a server ends, and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    job = read_job(folder)
    reports: ServerReports = resolve_name(job.engine)
    servers = servers_of(job, reports, folder, number, ports)
    deadline = time.monotonic() + max(1.0, job.timeout_s - end_seconds(job.timeout_s))
    try:
        start_all(list(servers.values()), job.directory, reports.health, deadline)
        while True:
            _report(folder, servers)
            next_report = time.monotonic() + PERIOD_SECONDS
            while time.monotonic() < next_report:
                check_all_alive(list(servers.values()), "during the load")
                time.sleep(CHECK_SECONDS)
    except TrialFailure as failure:
        _report(folder, {}, failure)
        return report(failure)
    finally:
        stop_all(list(servers.values()))


def servers_of(
    job: TrialJob, reports: ServerReports, folder: Path, number: int, ports: Sequence[str]
) -> dict[int, Server]:
    """Return the servers that run on the host with the index `number`, by the index of their instance."""
    patterns, servers = (*reports.failures, *job.patterns), dict[int, Server]()
    cores_by_number = dict(enumerate(sorted(os.sched_getaffinity(0))))
    for place, each in enumerate(job.instances):
        filled = each.at_head(job.hosts[each.host], ports[each.host])
        for host_offset, argv in enumerate((filled.argv, *filled.further)):
            if each.host + host_offset == number:
                name, log = f"instance {place} on {job.hosts[number]}", folder / log_name(place, host_offset)
                cores = tuple(cores_by_number[core] for core in filled.cores if core in cores_by_number)
                instance_on_host = replace(filled, argv=argv, further=(), cores=cores)
                servers[place] = Server(name, instance_on_host, log, patterns, serves=host_offset == 0)
    return servers


def _report(folder: Path, servers: Mapping[int, Server], failure: TrialFailure | None = None) -> None:
    data = {
        number: {"port": each.port, "startup_s": each.startup_s, "resident_bytes": each.resident_bytes()}
        for number, each in servers.items()
        if each.serves
    }
    problem = {"state": failure.state.value, "reason": failure.args[0]} if failure else {}
    new = folder / f"{REPORT}.new"
    new.write_text(json.dumps({"servers": data, "failure": problem}), encoding="utf-8")
    os.replace(new, folder / REPORT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")))
