"""Runs another load client and reads its report: guidellm, aiperf, `vllm bench serve` or `sglang.bench_serving`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flagcore.domain.serving import CLIENT_LOG
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.load.reports import read_report
from flagcore.engines.serving.trial.failures import TrialFailure, log_text
from flagcore.engines.serving.trial.servers import Served, free_port, is_owned_by
from flagcore.errors import UsageError

BALANCER = "flagcore.engines.serving.balancer"
BALANCER_SECONDS = 20.0
TAIL_LENGTH = 300
"""Number of characters of a client's last output in its failure."""


def run_client(
    command: Sequence[str], report: str, servers: Sequence[Served], model: str, folder: Path, deadline: float, name: str
) -> tuple[dict[str, float], float]:
    """Run a client in its own folder, and return the metrics of its report and its run time in seconds.

    `{url}`, `{model}` and `{report}` in `command` are replaced. Several servers get a balancer. Raises TrialFailure
    with the client's last output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report_file, log = folder / report, folder / CLIENT_LOG
    report_file.unlink(missing_ok=True)
    start = time.monotonic()
    with _client_url(servers) as url, log.open("wb") as output:
        words = [_fill_placeholders(word, url=url, model=model, report=str(report_file)) for word in command]
        try:
            process = subprocess.run(
                words,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - start),
            )
        except subprocess.TimeoutExpired:
            raise TrialFailure(TrialState.TIMED_OUT, f"the client of {name} did not end in time") from None
        except OSError as error:
            reason = f"serve.client.command: {words[0]} cannot be started: {error.strerror or error}"
            raise TrialFailure(TrialState.INVALID, reason) from None
    if process.returncode:
        output_tail = " ".join(log_text(log).split())[-TAIL_LENGTH:]
        raise TrialFailure(TrialState.FAILED, f"the client of {name} ended with {process.returncode}: {output_tail}")
    try:
        return read_report(report_file), time.monotonic() - start
    except UsageError as error:
        raise TrialFailure(TrialState.FAILED, f"the client of {name}: {error}") from None


@contextlib.contextmanager
def _client_url(servers: Sequence[Served]) -> Iterator[str]:
    """Yield the URL of a single server, or of a balancer for several servers."""
    if len(servers) == 1:
        yield servers[0].url
        return
    port = free_port()
    places = [server.url.removeprefix("http://") for server in servers]
    balancer = subprocess.Popen([sys.executable, "-m", BALANCER, str(port), *places], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + BALANCER_SECONDS
        while not is_owned_by(port, [balancer.pid]):
            if balancer.poll() is not None or time.monotonic() > deadline:
                raise TrialFailure(TrialState.FAILED, "the balancer does not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        balancer.terminate()
        balancer.wait()


def _fill_placeholders(word: str, **values: str) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
