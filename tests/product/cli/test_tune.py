"""`flag tune` with a command of Megatron's kind, and with servers of known speed. `flag run` of servers: when they are
ready, and that nothing outlives it. Real processes."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flagcore.domain.launch import PORT_VARIABLE
from flagcore.launchers.network import free_port
from tests.checks import books_balance, within
from tests.product.cli.conftest import SERVER, Flag, Project, Ran

pytestmark = [pytest.mark.slow, pytest.mark.spread]


@pytest.mark.costly
def test_the_best_can_be_rerun_reread_and_reestimated(flag: Flag, project: Project) -> None:
    model = project.folder / "model"
    model.mkdir()
    config = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, **config})
    )
    assert flag("tune", project.spec(model="./model"), "--run-dir", str(project.run_dir)).code == 0
    rerun = flag("estimate", str(project.run_dir / "best.yaml"), "--json").worked()
    assert project.result()["best"]["candidate"] in [row["candidate"] for row in json.loads(rerun.out)]
    completed = project.run("run", str(project.run_dir)).worked()
    assert "elapsed time per iteration (ms): 101.0" in completed.out
    script = project.run_dir / "best.sh"
    assert os.access(script, os.X_OK)
    assert os.popen(f"cd / && {script}").read().count("elapsed time per iteration (ms)") == 3
    explanation = flag("explain", str(project.run_dir)).worked()
    assert "measured" in explanation.out


@pytest.mark.costly
def test_the_best_is_started_at_the_end_if_the_spec_requests_it(flag: Flag, project: Project) -> None:
    spec = project.spec(control={"run_best": True, "max_trials": 2})
    completed = project.run("tune", spec, "--run-dir", str(project.run_dir), "--json").worked()
    assert json.loads(completed.out)["best"]
    assert "elapsed time per iteration" in completed.err


def test_without_a_megatron_there_is_no_way_to_run_its_trial_program(project: Project) -> None:
    (project.folder / "torch.py").write_text("raise ImportError")
    spec = project.spec(train={"command": None})
    first = "import sys, flagcore.tuner.strategies.learned"  # scipy asks what is loaded whether it is torch
    code = f"{first}; sys.modules['torch'] = None; from flagcore.cli import main; main()"
    completed_process = subprocess.run(
        [sys.executable, "-c", code, "tune", spec], capture_output=True, text=True, cwd=project.folder, timeout=120
    )
    assert completed_process.returncode == 4
    assert "pip install" in completed_process.stderr
    assert "Traceback" not in completed_process.stderr


def tune(flag: Flag, project: Project, **arguments: Any) -> Ran:
    return flag("tune", project.served(**arguments), "--run-dir", str(project.run_dir))


def test_if_no_configuration_meets_the_slo_the_nearest_is_named(flag: Flag, project: Project) -> None:
    only = {"parallel": 4}
    tune(flag, project, serve={"slo": {"ttft_s": {"p99": 0.05}}}, space=only, baseline=only).refused(
        3, "nearest", "parallel"
    )


@pytest.mark.costly
def test_the_fastest_that_keeps_the_slo_wins_and_the_cost_of_the_slo_is_reported(flag: Flag, project: Project) -> None:
    completed = tune(flag, project, serve={"slo": {"ttft_s": {"p99": 0.6}}}).worked()
    result = project.result()
    assert [trial["state"] for trial in result["trials"]] == ["measured"] * 3
    assert result["best"]["candidate"]["parallel"] == 2
    assert "Without the limits: trial " in completed.out
    measured = {trial["candidate"]["parallel"]: trial["measured"] for trial in result["trials"]}
    assert [bool(measured[slots]["broken"]) for slots in (1, 2, 4)] == [False, False, True]
    assert measured[4]["figures"]["goodput_requests_per_s"] == 0.0


@pytest.mark.costly
def test_a_killed_run_leaves_no_process_and_resumes_to_the_fastest_with_its_start_script(
    flag: Flag, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    file = project.served(space={"parallel": [1, 4]})
    process = project.start("tune", file, "--run-dir", str(project.run_dir))
    assert within(60, (project.run_dir / "trials" / "1" / "serve.json").exists)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert project.all_gone()
    rerun = flag("tune", file, "--run-dir", str(project.run_dir)).worked()
    assert "trial 0 (" not in rerun.err
    assert "resuming" in caplog.text
    result = project.result()
    assert books_balance(result)
    assert [trial["state"] for trial in result["trials"]] == ["measured"] * 2
    best = result["best"]
    assert best["candidate"]["parallel"] == best["measured"]["effective"]["parallel"] == 4
    assert result["baseline"]["candidate"]["parallel"] == 1
    assert result["gain"] > 0.2
    assert best["measured"]["figures"]["output_tokens_per_s"] > 0
    assert best["measured"]["figures"]["ttft_s"]["p99"] > 0.8
    launch = json.loads((project.run_dir / "best" / "launch.json").read_text())
    assert launch["argv"][:3] == [sys.executable, str(SERVER), "known"]
    assert "--parallel 4" in (project.run_dir / "best.sh").read_text()
    assert project.all_gone()


SERVE_SPEC = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > began + 0.7 else 503)
        self.end_headers()
    def log_message(self, *_): ...
began = time.monotonic()
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run's folder whose best is a server with a child in its own session, and its port."""
    port = free_port()
    (tmp_path / "best").mkdir()
    (tmp_path / "server.py").write_text(SERVE_SPEC)
    ready = [f"http://127.0.0.1:{port}/health"]
    launch = {"ready": ready, "missing": "", "sample": [], "folder": str(tmp_path), "directory": str(tmp_path)}
    (tmp_path / "best" / "launch.json").write_text(json.dumps(launch))
    command = shlex.join([sys.executable, str(tmp_path / "server.py")])
    (tmp_path / "best.sh").write_text(f"exec {command} ${{{PORT_VARIABLE}:-{port}}}\n")
    yield tmp_path, port
    for each in left(tmp_path):
        each.kill()


def left(folder: Path) -> list[psutil.Process]:
    name = str(folder / "server.py")
    return [each for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or ())]


def started(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    code = "from flagcore.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, "run", str(folder), *options], stderr=subprocess.PIPE)


def ready_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode().strip()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)])
def test_servers_are_reported_when_they_are_ready_and_end_with_the_command(
    run: tuple[Path, int], number: signal.Signals, code: int
) -> None:
    folder, port = run
    process = started(folder)
    assert ready_line(process) == f"flag: ready at http://127.0.0.1:{port}"
    assert len(left(folder)) == 2
    os.kill(process.pid, number)
    assert process.wait(30) == code
    assert within(20, lambda: not left(folder))


def test_a_server_that_ends_ends_the_command_with_its_status(run: tuple[Path, int]) -> None:
    folder, _ = run
    (folder / "server.py").write_text("raise SystemExit(7)")
    assert started(folder).wait(30) == 7


def test_a_port_in_use_is_reported_and_its_owner_is_not_mistaken_for_the_server(run: tuple[Path, int]) -> None:
    folder, port = run
    with socket.create_server(("127.0.0.1", port)):
        process = started(folder)
        holder = f"{psutil.Process().name()} (process {os.getpid()})"
        assert ready_line(process).startswith(f"flag: port {port} is in use by {holder}")
        assert process.wait(30) == 2
    assert not left(folder)


def test_another_port_is_that_of_the_server(run: tuple[Path, int]) -> None:
    folder, other = run[0], str(free_port())
    process = started(folder, "--port", other)
    assert ready_line(process) == f"flag: ready at http://127.0.0.1:{other}"
    process.terminate()
    assert process.wait(30) == 130
