"""Trials and probes on several hosts. A shell here stands for the channel to each; agents and guards are real."""

import contextlib
import fcntl
import json
import os
import re
import resource
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from flagcore_hosts import connection
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher, ssh_channel
from flagcore_hosts.launching import HostsRunning

from extras.hosts.tests.cluster.bed import HOST, need
from flagcore import plugins
from flagcore.api.commands.run import run_best
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.probe import Probe
from flagcore.domain.trial import TrialState
from flagcore.errors import HostLost, LaunchError, NoDevice
from flagcore.launchers import guard
from flagcore.launchers.guarded import MARKER, START_SECONDS
from flagcore.tuner.probe import probe
from tests import tasks
from tests.checks import ended, marked, within
from tests.tuner.test_probe import CANDIDATE, LIMIT, METRICS, TASK, Rehearsal

pytestmark = [pytest.mark.slow, pytest.mark.spread]

HOSTS = ("a", "b", "c")
TUNER = """
import sys
from flagcore.domain.launch import Launch
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher
launcher = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])
running = launcher.start(Launch(argv=("sh", "-c", sys.argv[2]), folder=sys.argv[1], hosts=("a", "b")))
print("started", flush=True)
running.wait(60)
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A word in the environment of all processes of a test; none may be left, nor a folder of an agent."""
    word = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", word)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    yield word
    assert within(20, lambda: not processes(word))
    assert list((tmp_path / "tmp").iterdir()) == []


def processes(mark: str) -> set[int]:
    return marked(mark) - {os.getpid()}


def shell(host: str) -> list[str]:
    return ["sh", "-c", agent_command()]


def launcher(**channels: Callable[[str], list[str]]) -> HostsLauncher:
    return HostsLauncher(name="shell", channel=lambda host: channels.get(host, shell)(host))


def launch(script: str, folder: Path, **how: object) -> Launch:
    return Launch(**{"argv": ("sh", "-c", script), "folder": str(folder), "hosts": HOSTS, **how})  # type: ignore[arg-type]


def run(script: str, folder: Path, started_by: HostsLauncher | None = None, **how: object) -> Exit:
    return ended((started_by or launcher()).start(launch(script, folder, **how)), 40)


ENDLESS, BANNER = "head -c 3000000 /dev/zero", "yes | head -c 3000000"
SLOW = "while echo x; do sleep 0.1; done"
"""Print a line without an end, and lines without an end, fast and slowly."""


def answering(*lines: str) -> Callable[[str], list[str]]:
    """Return a channel to a host that answers `lines`, and then nothing."""
    says = [line if line in (ENDLESS, BANNER, SLOW) else f"printf '%s\\n' '{line}'" for line in lines]
    script = "\n".join(["cat > /dev/null &", *says, "wait"])
    return lambda host: ["sh", "-c", script]


def test_each_host_runs_the_program_with_its_own_rank(tmp_path: Path, mark: str) -> None:
    script = "echo {node_rank} of {nnodes} at {master_addr} on $NODE_RANK; echo port {master_port} at {interface}"
    script += "; echo {node_ports}"
    exit_record = run(script, tmp_path / "trial", hosts=("127.0.0.1", "b", "c"))
    assert (exit_record.code, exit_record.ended_by) == (0, None)
    lines = (tmp_path / "trial" / "stdout.log").read_text().splitlines()
    assert {line for line in lines if " of " in line} == {f"{rank} of 3 at 127.0.0.1 on {rank}" for rank in range(3)}
    assert len({line for line in lines if re.fullmatch(r"port \d+ at \w+", line)}) == 1
    assert len({line for line in lines if re.fullmatch(r"\d+,\d+,\d+", line)}) == 1


def test_variables_of_network_devices_differ_by_host(tmp_path: Path, mark: str) -> None:
    need()
    devices = {
        "10.9.0.1": ("ib7", "mlx5_10:ACTIVE mlx5_2:ACTIVE mlx5_3:DOWN"),
        "10.9.0.2": ("bond0", "bnxt_re0:ACTIVE"),
        "10.9.0.3": ("eth3", ""),
    }

    def channel(host: str) -> list[str]:
        interface, adapters = devices[host]
        return ["unshare", "--net", "--mount", "sh", "-c", HOST, "sh", interface, host, adapters, *shell(host)]

    given = {"X_SOCKET_IFNAME": "={interface}", "X_IB_HCA": "{adapters}"}
    planned = launch('echo "$X_SOCKET_IFNAME ${X_IB_HCA-unset}"', tmp_path, hosts=tuple(devices), environment=given)
    ended(HostsLauncher(name="shell", channel=channel).start(planned))
    lines = [(tmp_path / "hosts" / host / "stdout.log").read_text() for host in devices]
    assert lines == ["=ib7 mlx5_2,mlx5_10\n", "=bond0 bnxt_re0\n", "=eth3 unset\n"]


def test_the_folder_of_a_killed_agent_is_removed_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    old, used, new = (tmp_path / "tmp" / f"flagcore-agent-{name}" for name in ("killed", "running", "new"))
    other = tmp_path / "tmp" / "flagcore-abcdefgh"  # of a command such as `flag calibrate`
    for each in (old, used, new, other):
        each.mkdir(parents=True)
    for each in (old, used, other):
        os.utime(each, (0, 0))
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run("true", tmp_path / "trial").code == 0
    os.close(descriptor)
    assert {*(tmp_path / "tmp").glob("flagcore-*")} == {used, new, other}


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_ssh_forwards_nothing(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host *\n  ForwardAgent yes\n  ForwardX11 yes\n  LocalForward 8080 far:80\n")
    ssh, *options, _agent = ssh_channel("a")
    shown = subprocess.run([ssh, "-G", "-F", tmp_path / "config", *options], capture_output=True, text=True, check=True)
    assert {"forwardagent no", "forwardx11 no", "clearallforwardings yes"} <= {*shown.stdout.splitlines()}


def test_files_go_to_every_host_and_come_back(tmp_path: Path, mark: str) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "job.json").write_text(f'{{"output": "{folder}"}}')
    script = f"cat job.json; head -c 300000 /dev/zero > {folder}/out-$NODE_RANK; mkdir sub; pwd > sub/{{node_rank}}"
    assert run(script, folder).code == 0
    assert (folder / "job.json").read_text() == f'{{"output": "{folder}"}}'
    assert (folder / "out-0").read_bytes() == (folder / "hosts" / "b" / "out-1").read_bytes() == bytes(300_000)
    remote_folder = (folder / "hosts" / "c" / "sub" / "2").read_text().strip()
    assert remote_folder in (folder / "hosts" / "c" / "stdout.log").read_text()
    assert str(folder) not in remote_folder
    assert (folder / "sub" / "0").exists()


def test_the_first_failure_and_the_time_limit_end_all(tmp_path: Path, mark: str) -> None:
    script = "[ $NODE_RANK = 1 ] && { echo broken >&2; exit 7; }; sleep 60"
    began = time.monotonic()
    exit_record = run(script, tmp_path / "trial")
    assert (exit_record.code, exit_record.ended_by, exit_record.detail) == (7, None, "b")
    assert run("sleep 60", tmp_path / "limited", timeout_seconds=1.0).ended_by == "timeout"
    assert time.monotonic() - began < 30
    assert "broken" in (tmp_path / "trial" / "stderr.log").read_text()


@pytest.mark.parametrize("client", [(), ("sleep", "60")])
def test_stop_ends_the_trial_everywhere(tmp_path: Path, mark: str, client: tuple[str, ...]) -> None:
    script = "setsid sleep 60 & exec sleep 60"
    trial = launcher().start(launch(script, tmp_path / "trial", hosts=("a", "b"), client=client))
    assert trial.wait(0) is None
    exit_record = trial.stop()
    assert exit_record.ended_by == "request"
    assert trial.stop() == exit_record


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_flagcore_is_killed(tmp_path: Path, mark: str, number: int) -> None:
    argv = [sys.executable, "-c", TUNER, str(tmp_path / "trial"), "(setsid sleep 60 &) ; sleep 60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as tuner:
        assert tuner.stdout
        assert tuner.stdout.readline() == b"started\n"
        assert len(processes(mark)) > 4
        tuner.send_signal(number)


def detached(host: str) -> list[str]:
    """Return a channel to an agent that is in a session of its own, as on another host."""
    return ["sh", "-c", f"cat | setsid sh -c {shlex.quote(agent_command())} | cat"]


def test_a_silent_host_is_lost(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 4.0)
    trial = launcher(c=detached).start(launch("sleep 60", tmp_path / "trial", hosts=("a", "c")))
    agent = agent_below(trial.connections[1].process.pid, mark)
    os.kill(agent, signal.SIGSTOP)
    exit_record = ended(trial)
    assert (exit_record.ended_by, exit_record.detail[:2]) == ("host", "c:")
    os.kill(agent, signal.SIGCONT)


def agent_below(parent: int, mark: str) -> int:
    families = {pid: guard.read_ids(pid) or (0, 0, 0, b"Z") for pid in processes(mark)}
    (agent,) = [pid for pid, family in families.items() if family[:2] == (parent, pid)]
    return agent


def test_a_host_that_the_scheduler_takes_away_is_lost(tmp_path: Path, mark: str) -> None:
    trial = launcher(c=detached).start(launch("sleep 60", tmp_path / "trial"))
    agent = agent_below(trial.connections[2].process.pid, mark)
    parents = {pid: (guard.read_ids(pid) or (0,))[0] for pid in processes(mark)}
    host_launcher = {agent}
    while remaining := {pid for pid, parent in parents.items() if parent in host_launcher} - host_launcher:
        host_launcher |= remaining
    assert len(host_launcher) > 2
    for pid in host_launcher:  # as Slurm at the end of a step
        with contextlib.suppress(ProcessLookupError):  # the signal of its parent has ended it
            os.kill(pid, signal.SIGTERM)
    exit_record = ended(trial)
    assert (exit_record.ended_by, exit_record.detail[:2]) == ("host", "c:")


def test_processes_of_a_lost_trial_end_before_the_next_one(tmp_path: Path, mark: str) -> None:
    host_launcher = launcher()
    leftover = subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: "0123"}, start_new_session=True)
    host_launcher.lost["b"] = "0123"
    assert run("true", tmp_path / "trial", host_launcher).code == 0
    assert leftover.wait(5) == -signal.SIGKILL
    assert host_launcher.lost == {}


READY = '{"ready": {"time": 0, "python": "3.11", "port": 4000, "free_disk_bytes": 99999999999, "left": 0}}'


@pytest.mark.parametrize(
    "lines",
    [
        ['{"ready": {"port": 4000}}'],
        [READY.replace("99999999999", "0")],
        ["Welcome!", "[3]", READY, "{oops"],
        [READY, '{"file": "../../x", "at": 0, "data": ""}'],
        [READY, '{"file": "a\\u0000b", "at": 0, "data": ""}'],
        [READY, "[" * 100_000],
        [READY, '{"exit": {"code": 0, "ended_by": null, "duration_s": NaN, "peak_memory_bytes": null, "warm": false}}'],
        [READY, '{"problem": "no"}'],
        [READY, *(f'{{"file": "x{n}/stdout.log", "at": 50000000, "data": ""}}' for n in range(100))],
        [READY, ENDLESS],
        [BANNER],
        pytest.param([SLOW], marks=pytest.mark.long),
    ],
)
def test_a_host_that_sends_nonsense_costs_only_its_trial(tmp_path: Path, mark: str, lines: list[str]) -> None:
    host_launcher, start = launcher(b=answering(*lines)), time.monotonic()
    try:
        lost_host = run("sleep 60", tmp_path / "trial", host_launcher, hosts=("a", "b")).lost_host
    except HostLost as error:
        lost_host = error.host
    assert lost_host == "b"
    assert time.monotonic() - start < START_SECONDS
    assert host_launcher.failures == {"b": 1}
    assert not (tmp_path / "x").exists()


def test_a_stopped_process_is_named_with_its_host(tmp_path: Path, mark: str) -> None:
    end = {"code": -9, "ended_by": "stopped", "duration_s": 40.0, "peak_memory_bytes": None, "warm": False}
    lines = (READY, '{"started": 7}', json.dumps({"exit": {**end, "detail": "process 7 (python)"}}))
    exit_record = run("sleep 60", tmp_path / "trial", launcher(b=answering(*lines)), hosts=("a", "b"))
    assert (exit_record.ended_by, exit_record.detail) == ("stopped", "b: process 7 (python)")
    assert exit_record.lost_host is None


def test_the_user_of_a_host_is_only_in_the_command_that_logs_in(tmp_path: Path, mark: str) -> None:
    targets = []

    def channel(target: str) -> list[str]:
        targets.append(target)
        return shell(target)

    host_launcher = HostsLauncher(name="shell", channel=channel, logs_in=True, users={"b": "ann"})
    with host_launcher.keep_agents():
        assert run("echo {master_addr}", tmp_path / "trial", host_launcher, hosts=("b", "a")).code == 0
    assert run("true", tmp_path / "check", host_launcher.for_checks(), hosts=("b",)).code == 0
    assert targets == ["ann@b", "a", "ann@b"]
    assert (tmp_path / "trial" / "stdout.log").read_text() == "b\nb\n"
    assert sorted(path.name for path in (tmp_path / "trial" / "hosts").iterdir()) == ["a", "b"]


def test_of_searches_that_claim_hosts_together_one_gets_them_and_the_others_are_told_its_name(
    tmp_path: Path, mark: str
) -> None:
    def search(each: int) -> HostsLauncher:
        return HostsLauncher(name="shell", channel=shell, owner=f"process {each} in {mark}\nfolder \udcff")

    def start(each: int) -> HostsRunning | HostLost:
        hosts = ("a", "b") if each else ("b", "a")
        try:
            return search(each).start(launch("sleep 60", tmp_path / str(each), hosts=hosts))
        except HostLost as refused:
            return refused

    with ThreadPoolExecutor() as threads:
        started = [*threads.map(start, range(3))]
    ((first, running),) = [(each, one) for each, one in enumerate(started) if isinstance(one, HostsRunning)]
    refused = [(one.host, f"process {first} in" in str(one)) for one in started if isinstance(one, HostLost)]
    assert refused == [("a", True), ("a", True)]
    assert run("true", tmp_path / "same", search(first), hosts=("b",)).code == 0
    running.stop()
    assert within(20, lambda: isinstance(again := start(first + 1), HostsRunning) and again.stop())


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
def test_the_last_line_of_a_log_needs_no_newline(hosts: tuple[str, ...], tmp_path: Path, mark: str) -> None:
    assert run("printf 'first\\nlast %s' {node_rank}", tmp_path, hosts=hosts).code == 0
    lines = (tmp_path / "stdout.log").read_text().splitlines()
    assert sorted(lines) == sorted([*["first"] * len(hosts), *(f"last {rank}" for rank in range(len(hosts)))])


def test_the_best_command_runs_on_its_hosts_and_its_output_is_printed_as_it_is(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    saved = {"ready": (), "missing": "", "sample": (), "folder": "", "directory": str(tmp_path), "users": {}}
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "launch.json").write_text(json.dumps({**saved, "launcher": "shell", "hosts": ["a", "b"]}))
    (tmp_path / "best.sh").write_text("printf '\\377\\n'; echo x >&2; [ $NODE_RANK = 0 ] || sleep 60; exit 3")
    monkeypatch.setattr(plugins, "launcher", lambda name: launcher())
    with pytest.raises(SystemExit) as finished:
        run_best(tmp_path)
    assert finished.value.code == 3
    output, errors = capsysbinary.readouterr()
    assert (output.split()[0], errors.split()[0]) == (b"\xff", b"x")


def test_a_host_that_never_answered_is_an_error_of_the_launch(tmp_path: Path, mark: str) -> None:
    refusing = launcher(c=lambda host: ["sh", "-c", "echo Permission denied >&2; exit 255"])
    with pytest.raises(LaunchError, match="c: Permission denied"):
        refusing.start(launch("true", tmp_path / "trial"))
    assert refusing.choose_hosts(HOSTS, 2) == HOSTS[:2]
    assert refusing.choose_hosts(HOSTS[1:], 1) == HOSTS[1:2]
    with pytest.raises(LaunchError, match="host"):
        launcher().start(launch("true", tmp_path / "trial", directory="/no/such/folder"))
    with pytest.raises(LaunchError, match="no-such-ssh"):
        launcher(a=lambda host: ["no-such-ssh"]).start(launch("true", tmp_path / "trial"))
    with pytest.raises(NoDevice, match="no hosts"):
        launcher().start(launch("true", tmp_path / "trial", hosts=()))
    with pytest.raises(LaunchError, match="/no/such"):
        launcher().start(launch("sleep 60", tmp_path / "trial", client=("/no/such",)))


def test_secrets_are_in_no_command_line(tmp_path: Path, mark: str) -> None:
    trial = launcher().start(launch("sleep 60", tmp_path / "trial", environment={"HF_TOKEN": "hidden-4711"}))
    lines = [guard.read_proc(pid, "cmdline") for pid in processes(mark)]
    assert len(lines) > 6
    assert not any(b"hidden-4711" in line for line in lines)
    assert "hidden-4711" not in (tmp_path / "trial" / "launch.json").read_text()
    trial.stop()


def test_a_spare_replaces_a_host_that_was_lost() -> None:
    host_launcher = launcher()
    assert host_launcher.choose_hosts(HOSTS, 2) == ("a", "b")
    host_launcher.failures["a"] = 1
    assert host_launcher.choose_hosts(HOSTS, 2) == ("c", "b")
    host_launcher.failures["c"] = 1
    assert host_launcher.choose_hosts(HOSTS, 2) == ("a", "b")
    host_launcher.failed_at["a"] = 9.0
    assert host_launcher.choose_hosts(HOSTS, 2) == ("c", "b")
    host_launcher.give_up("a")
    assert host_launcher.choose_hosts(HOSTS, 2) == ("c", "b")
    host_launcher.failures["b"] = 2
    with pytest.raises(LaunchError, match="1 of 2"):
        host_launcher.choose_hosts(HOSTS, 2)
    assert host_launcher.choose_hosts(HOSTS, 3) == HOSTS


def test_a_resumed_run_prefers_other_hosts_and_ends_remaining_processes(tmp_path: Path, mark: str) -> None:
    running = launcher().start(launch("sleep 60", tmp_path / "trial", hosts=("a", "b")))
    resumed = launcher()
    resumed.resume(["a", "a"], [str(tmp_path / "none"), str(tmp_path / "trial")])
    assert resumed.choose_hosts(HOSTS, 2) == ("c", "b")
    resumed.failures["b"] = resumed.failures["c"] = 2
    assert resumed.choose_hosts(HOSTS[:2], 1) == ("a",)
    assert run("true", tmp_path / "next", resumed, hosts=("a", "b")).code == 0
    ended(running)


def test_a_loss_is_the_reason_even_if_the_program_failed_first(tmp_path: Path, mark: str) -> None:
    host_launcher = launcher()
    script = "[ $NODE_RANK = 0 ] && exit 7; trap '' TERM; sleep 60"
    trial = host_launcher.start(launch(script, tmp_path / "trial", hosts=("a", "b")))
    channel = trial.connections[1].process
    assert channel.stdin
    channel.stdin.close()
    exit_record = ended(trial)
    assert (exit_record.ended_by, exit_record.detail[:2]) == ("host", "b:")
    assert host_launcher.failures == {"b": 1}


def test_a_host_may_take_longer_to_answer_than_to_be_lost() -> None:
    slow_connection = connection.Connection("a", ["cat"])
    slow_connection.wire.heard_at -= 2 * connection.SILENCE_SECONDS
    slow_connection.beat()
    assert slow_connection.open
    slow_connection.answered = True
    slow_connection.beat()
    assert not slow_connection.open
    slow_connection.disconnect()
    slow_connection.close(5)


def test_the_limit_of_open_files_is_raised_for_the_channels_as_far_as_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
        connection.allow_files(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
        connection.allow_files(2 * hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_the_client_ends_the_programs_of_the_hosts(tmp_path: Path, mark: str) -> None:
    client = ("sh", "-c", "echo asked; echo figures > metrics")
    exit_record = run("sleep 60", tmp_path / "trial", hosts=("a", "b"), client=client)
    assert (exit_record.code, exit_record.ended_by) == (0, None)
    assert (tmp_path / "trial" / "metrics").read_text() == "figures\n"
    assert (tmp_path / "trial" / "stdout.log").read_text() == "asked\n"


def test_a_failed_client_is_the_reason_and_a_failed_host_ends_it(tmp_path: Path, mark: str) -> None:
    exit_record = run("sleep 60", tmp_path / "1", hosts=("a", "b"), client=("sh", "-c", "exit 5"))
    assert (exit_record.code, exit_record.ended_by, exit_record.detail) == (5, None, "")
    script = "[ $NODE_RANK = 1 ] && exit 7; sleep 60"
    exit_record = run(script, tmp_path / "2", hosts=("a", "b"), client=("sleep", "60"))
    assert (exit_record.code, exit_record.ended_by, exit_record.detail) == (7, None, "b")


def test_agents_are_kept_for_the_next_trial_unless_their_host_is_lost(tmp_path: Path, mark: str) -> None:
    started: list[str] = []

    def channel(host: str) -> list[str]:
        started.append(host)
        return shell(host)

    host_launcher = HostsLauncher(name="shell", channel=channel)

    def code(script: str, name: str, seconds: float = 30.0) -> int | None:
        running = host_launcher.start(launch(script, tmp_path / name, hosts=("a", "b")))
        exit_record = running.wait(seconds) or running.stop()
        return exit_record.code

    def are_idle(number: int) -> bool:
        return within(10, lambda: len(host_launcher.agents._idle) == number)  # type: ignore[union-attr]

    with host_launcher.keep_agents():
        assert code("pwd; echo $NODE_RANK > rank", "1") == 0
        assert code("[ $NODE_RANK = 1 ] && exit 7; sleep 60", "2") == 7
        assert code("pwd; cat rank; sleep 60", "3", 1.0) != 0
        assert started == ["a", "b"]
        assert len({(tmp_path / name / "stdout.log").read_text() for name in ("1", "3")}) == 2
        assert "rank" not in {path.name for path in (tmp_path / "3").iterdir()}
        for pid in processes(mark):
            if b"flagcore_hosts.agent" in guard.read_proc(pid, "cmdline"):
                os.kill(pid, signal.SIGTERM)
        assert are_idle(0)
        assert code("true", "4") == 0
        assert started == ["a", "b"] * 2
        assert are_idle(2)


WARMED = """
import os, sys
template = 0
def ready(arguments):
    global template
    template = os.getpid()
def main(arguments):
    print(template, os.environ["NODE_RANK"])
    return int(arguments[0]) if os.environ["NODE_RANK"] == "1" else 0
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def warmed(tmp_path: Path, program: str, codes: Iterable[int]) -> Iterator[tuple[int, bool, set[str]]]:
    """Run trials of a program one after the other, and yield the code, whether it was forked, and what was printed."""
    (tmp_path / "warmed").mkdir()
    (tmp_path / "warmed" / "__main__.py").write_text(program)
    host_launcher = launcher()
    with host_launcher.keep_agents():
        for number, code in enumerate(codes):
            argv, environment = (sys.executable, "-m", "warmed", str(code)), {"PYTHONPATH": str(tmp_path)}
            how = {"argv": argv, "hosts": ("a", "b"), "environment": environment, "warm": True}
            found = run("", tmp_path / str(number), host_launcher, **how)
            yield found.code, found.warm, set((tmp_path / str(number) / "stdout.log").read_text().splitlines())


@pytest.mark.costly
def test_a_kept_agent_forks_trials_until_one_fails_and_no_program_that_is_unfit(tmp_path: Path, mark: str) -> None:
    trials = list(warmed(tmp_path, WARMED, (0, 0, 3, 0)))
    assert [(code, warm) for code, warm, _ in trials] == [(0, True), (0, True), (3, True), (0, True)]
    templates = [printed for _, _, printed in trials]
    assert len(templates[0]) == 2
    assert templates[0] == templates[1] >= templates[2]  # the other host may be ended before it prints
    assert not templates[0] & templates[3]
    (tmp_path / "cold").mkdir()
    unfit = warmed(tmp_path / "cold", WARMED.replace("global template", "raise ValueError"), (0, 0))
    assert list(unfit) == [(0, False, {"0 0", "0 1"})] * 2


def test_a_host_that_never_ends_its_trial_costs_only_its_trial(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flagcore_hosts.launching.START_SECONDS", 1.0)
    beats = f"cat > /dev/null & echo '{READY}'; echo '{{\"started\": 1}}'; while sleep 1; do echo; done"
    host_launcher = launcher(b=lambda host: ["sh", "-c", beats.replace("echo;", "echo {};")])
    running = host_launcher.start(launch("true", tmp_path / "trial", hosts=("b",), timeout_seconds=1.0))
    exit_record = ended(running)
    assert (exit_record.ended_by, exit_record.lost_host) == ("host", "b")


@pytest.mark.slow
def test_ranks_run_on_separate_hosts_and_a_lost_host_proves_nothing(tmp_path: Path) -> None:
    def channel(host: str) -> list[str]:
        return ["sh", "-c", agent_command() if host != "lost" else "cat > /dev/null & sleep 1; exit 1"]

    def on(*hosts: str) -> Probe:
        cluster = replace(TASK.spec.cluster, hosts=hosts, nodes=2)
        task = replace(TASK, spec=replace(TASK.spec, cluster=cluster, launcher="shell"))
        launcher = HostsLauncher(name="shell", channel=channel)
        program = f"open({str(tmp_path / 'metrics')!r}); open('metrics.json', 'w').write({METRICS!r})"
        (tmp_path / "metrics").touch()
        engine = Rehearsal(lambda rank: program)
        engine.probes.launch = lambda platform, candidate, rank, folder, device=0: Launch(  # type: ignore[method-assign]
            argv=(sys.executable, "-c", program), folder=folder
        )
        folder = str(tmp_path / hosts[-1])
        return probe(
            tasks.platform(task, engine=engine), launcher, CANDIDATE, folder, LIMIT, (0, 1, 2), finish=False, devices=1
        )

    found = on("a", "b")
    assert [(rank.state, rank.inconclusive) for rank in found.ranks] == [(TrialState.MEASURED, False)] * 3
    assert {rank.device for rank in found.ranks} == {0, 1}
    with pytest.raises(HostLost):  # the search waits for the host, and probes the candidate again
        on("a", "lost")
