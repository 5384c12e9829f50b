"""Another load client, read by its report: guidellm, aiperf, `vllm bench serve` or `sglang.bench_serving`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flagcore.domain.trial import TrialState
from flagcore.engines.serving.load.reports import read_report
from flagcore.engines.serving.trial.failures import TrialFailure
from flagcore.engines.serving.trial.servers import Served, free_port, is_owned_by
from flagcore.errors import UsageError

BALANCER = "flagcore.engines.serving.balancer"
BALANCER_SECONDS = 20.0
TAIL = 300
"""Characters of a client's last output that its failure quotes."""


def ask_client(
    command: Sequence[str], report: str, servers: Sequence[Served], model: str, folder: Path, deadline: float, name: str
) -> tuple[dict[str, float], float]:
    """Run a client in its own folder, and return the figures of its report and its seconds.

    `{url}`, `{model}` and `{report}` in `command` are replaced. Several servers are behind one balancer. Raises
    TrialFailure with the client's last output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where, log = folder / report, folder / "client.log"
    where.unlink(missing_ok=True)
    began = time.monotonic()
    with _one_url(servers) as url, log.open("wb") as output:
        words = [_filled(word, url=url, model=model, report=str(where)) for word in command]
        try:
            ended = subprocess.run(
                words,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - began),
            )
        except subprocess.TimeoutExpired:
            raise TrialFailure(TrialState.TIMED_OUT, f"the client of {name} did not end in time") from None
        except OSError as error:
            reason = f"serve.client.command: {words[0]} cannot be started: {error.strerror or error}"
            raise TrialFailure(TrialState.INVALID, reason) from None
    if ended.returncode:
        last = " ".join(log.read_text("utf-8", "replace").split())[-TAIL:]
        raise TrialFailure(TrialState.FAILED, f"the client of {name} ended with {ended.returncode}: {last}")
    try:
        return read_report(where), time.monotonic() - began
    except UsageError as error:
        raise TrialFailure(TrialState.FAILED, f"the client of {name}: {error}") from None


@contextlib.contextmanager
def _one_url(servers: Sequence[Served]) -> Iterator[str]:
    """Yield the address of the server, or of a balancer before several."""
    if len(servers) == 1:
        yield servers[0].url
        return
    port = free_port()
    places = [server.url.removeprefix("http://") for server in servers]
    balancer = subprocess.Popen([sys.executable, "-m", BALANCER, str(port), *places], stdin=subprocess.DEVNULL)
    try:
        ready = time.monotonic() + BALANCER_SECONDS
        while not is_owned_by(port, [balancer.pid]):
            if balancer.poll() is not None or time.monotonic() > ready:
                raise TrialFailure(TrialState.FAILED, "the balancer does not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        balancer.terminate()
        balancer.wait()


def _filled(word: str, **places: str) -> str:
    for name, value in places.items():
        word = word.replace(f"{{{name}}}", value)
    return word
