"""Entry point: `python -m flagcore_serving.trial FOLDER`.

It serves the candidate in FOLDER/serve.json, sends the loads and writes FOLDER/metrics.json. On a failure it writes no
metrics, the exit code is not 0, and the last line on stderr contains the class of the failure (`out of memory:`,
`invalid configuration:`, `timed out:` or `failed:`) and the reason. Each server logs into FOLDER/instance-N.log.
"""

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name

import psutil
from flagcore_vendorkit.metrics import METRICS

from flagcore.domain.space import KnobValue
from flagcore.domain.trial import TrialState
from flagcore_serving.launch.reports import ServerReports
from flagcore_serving.launch.server import TrialJob, log_name, read_job
from flagcore_serving.load.routing import ENCODE
from flagcore_serving.trial.answers import FILE as ANSWERS_FILE
from flagcore_serving.trial.answers import SHARE, ask
from flagcore_serving.trial.failures import TrialFailure, end_seconds, log_text, report, wait_until_quiet
from flagcore_serving.trial.loads import LoadRunner, counters
from flagcore_serving.trial.servers import (
    INVALID_ANSWERS,
    Served,
    Server,
    check_all_alive,
    check_ended,
    connect,
    log,
    start_all,
    stop_all,
)

MAX_AGE_SECONDS = 120.0
"""Maximum plausible age of this process in seconds. Some containers report a wrong boot time, and thus a higher age."""
STOP_SHARE = 0.6
"""Share of `end_seconds` after which servers that have not stopped are killed, so that the report is in time."""


def main(arguments: list[str], age_s: float = 0.0) -> int:
    """Run the trial in the folder that the command line names, and return the exit code.

    `age_s`: for how many seconds the trial has already been running.
    """
    began = time.monotonic() - age_s
    try:
        if len(arguments) != 1:
            raise ValueError("usage: python -m flagcore_serving.trial FOLDER")
        folder = Path(arguments[0])
        for name in (METRICS, ANSWERS_FILE):  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        job = read_job(folder)
    except (OSError, ValueError) as error:
        return report(TrialFailure(TrialState.INVALID, str(error)))
    # an exception, so that the servers are stopped before this program ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(job, folder, began)
    except TrialFailure as failure:
        return report(failure)
    except Exception as error:
        traceback.print_exc()
        return report(TrialFailure(TrialState.FAILED, f"{type(error).__name__}: {error}"))
    return 0


def run(job: TrialJob, folder: Path, began: float | None = None) -> None:
    """Run `job` and write its metrics into `folder`. Raises TrialFailure.

    `began`: when the trial began (time.monotonic()); None means now.
    """
    now = time.monotonic()
    # at least a second, in which the first problem of a server is found and reported
    deadline = max(now + 1.0, (now if began is None else began) + job.timeout_s - end_seconds(job.timeout_s))
    reports: ServerReports = resolve_name(job.engine)
    with running_servers(job, reports, folder, deadline) as servers:
        effective = _read_back(job, reports, servers)
        runner = LoadRunner(job, reports, servers, folder, deadline)
        points = runner.points()
        ended = time.monotonic()
        if job.answers and not runner.is_slow and not runner.prefill and ended < deadline:
            seconds = SHARE * (ended - (now if began is None else began))
            found = ask(runner.targets, runner.model, job.loads[0], job.vocab_size, seconds, deadline - ended)
            (folder / ANSWERS_FILE).write_text(json.dumps(found), encoding="utf-8")
        metrics = {
            "schema_version": 1,
            "effective": effective,
            "versions": dict(job.versions),
            "points": points,
            "partial": runner.is_slow,
            "highest": asdict(runner.highest) if runner.highest else None,
            "counters": counters(reports, runner.answering),
            "startup_s": [server.startup_s for server in servers],
            "memory": [dict(reports.memory(log_text(server.log))) for server in servers],
            "resident_bytes": [server.resident_bytes() for server in servers],
        }
        check_all_alive(servers, "after the load")
    new = (folder / METRICS).with_suffix(".new")
    new.write_text(json.dumps(metrics, indent=1, allow_nan=False), encoding="utf-8")
    new.replace(folder / METRICS)


@contextlib.contextmanager
def running_servers(job: TrialJob, reports: ServerReports, folder: Path, deadline: float) -> Iterator[Sequence[Served]]:
    """Start the servers and yield them when all are healthy; afterwards stop those that run on this machine."""
    patterns = (*reports.failures, *job.patterns)
    if job.hosts:
        yield connect(job, folder, patterns, reports.health, deadline)
        return
    servers = [
        Server(f"instance {number}", each, folder / log_name(number), patterns)
        for number, each in enumerate(job.instances)
    ]
    try:
        encoders = [each for each in servers if each.instance.kind == ENCODE]  # others need their addresses
        others = [each for each in servers if each not in encoders]
        start_all(encoders, job.directory, reports.health, deadline)
        for each in others:
            each.instance = each.instance.with_encoders([encoder.url for encoder in encoders])
        start_all(others, job.directory, reports.health, deadline)
        yield servers
    except TrialFailure as failure:
        log(str(failure))  # in case this program is killed while it stops the servers
        raise
    finally:
        stop_all(servers, deadline + STOP_SHARE * end_seconds(job.timeout_s))


def _read_back(job: TrialJob, reports: ServerReports, servers: Sequence[Served]) -> dict[str, KnobValue]:
    """Return the knob values that the servers report and that are equal on all of them. Raises TrialFailure if a server
    uses another value than requested."""
    reported: list[Mapping[str, KnobValue]] = []
    for server, instance in zip(servers, job.instances, strict=True):
        if instance.kind == ENCODE:  # it has no settings of the language model
            continue
        wait_until_quiet(server.log)
        try:
            values = reports.effective(server.fetch, log_text(server.log))
        except INVALID_ANSWERS as error:
            check_ended([server], "while its settings were read")
            raise TrialFailure(TrialState.FAILED, f"{server.name} does not report its settings: {error}") from None
        for knob, value in values.items():
            set_value = instance.requested.get(knob)
            if set_value is not None and set_value != value:
                reason = f"{server.name} runs {knob} = {value} instead of {set_value}"
                raise TrialFailure(TrialState.INVALID, reason)
        reported.append(values)
    combined = {knob: value for values in reported for knob, value in values.items()}
    return {
        knob: value for knob, value in combined.items() if all(values.get(knob, value) == value for values in reported)
    }


if __name__ == "__main__":
    age_s = time.time() - psutil.Process().create_time()
    sys.exit(main(sys.argv[1:], age_s if 0.0 < age_s < MAX_AGE_SECONDS else 0.0))
