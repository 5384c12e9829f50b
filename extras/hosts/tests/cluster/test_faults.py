"""Faults at random moments of a tune: the best is found or the tune says how to resume it, and nothing is left.
Megatron-LM's own `pretrain_gpt.py` with torchrun on two hosts, with faults, and the best by `flag run`."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from engines.megatron.tests.command.real import ARCHITECTURE, MEGATRON, needs_megatron_lm, spec_of
from extras.hosts.tests.cluster.bed import NETWORK, SSHD, Bed
from extras.hosts.tests.cluster.conftest import Project, Tune
from flagcore import api
from flagcore.launchers import guard
from tests.checks import books_balance, check_kept_once
from tests.product.cli.conftest import BEST, FLAG

pytestmark = [pytest.mark.slow, pytest.mark.long]

CLEAN_SECONDS = 15.0
"""From the return of a host to the end of the last orphaned process."""
TUNES = int(os.environ.get("FLAGCORE_FAULTS", "12"))
"""The number of tunes. Each has a fault, and every third has two at once."""
HOSTS_LOST = 6
"""The exit code of a search that ends because of its hosts."""
Undo = Callable[[], object]
Fault = Callable[[Tune, str], Undo]
"""Lets something fail on a host, and returns what undoes it."""


def signals(bed: Bed, host: str, word: bytes, begin: int, end: int = 0) -> Undo:
    """Send a signal to the processes on a host whose command has a word. The result sends them another signal."""
    deadline = time.monotonic() + 5
    while not (found := [pid for pid in guard.all_processes() if bed.runs(pid, host) and word in command(pid)]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in found:
        guard.send(pid, signal.Signals(begin))
    return lambda: [guard.send(pid, signal.Signals(end)) for pid in found if end]


def command(pid: int) -> bytes:
    return guard.read_proc(pid, "cmdline")


def kill(word: bytes) -> Fault:
    return lambda tune, host: signals(tune.bed, host, word, signal.SIGKILL)


def stop(word: bytes) -> Fault:
    return lambda tune, host: signals(tune.bed, host, word, signal.SIGSTOP, signal.SIGCONT)


def of_bed(begin: Callable[[Bed, str], object], end: Callable[[Bed, str], object]) -> Fault:
    def fault(tune: Tune, host: str) -> Undo:
        begin(tune.bed, host)
        return lambda: end(tune.bed, host)

    return fault


def end_logins(bed: Bed, host: str) -> None:
    """End sshd and all connections to it."""
    signals(bed, host, b"sshd", signal.SIGKILL)


def forget(bed: Bed, host: str) -> None:
    """Let h0 not find the address of a host, and close the connection to it."""
    lines = (bed.folder / "hosts").read_text().splitlines(keepends=True)
    (bed.folder / "without").write_text("".join(line for line in lines if not line.endswith(f" {host}\n")))
    bed.run("h0", "mount", "--bind", str(bed.folder / "without"), "/etc/hosts")
    signals(bed, "h0", f"\0{host}\0".encode(), signal.SIGKILL)


def kill_flagcore(tune: Tune, host: str) -> Undo:
    if tune.process.poll() is None:
        tune.kill()
    return lambda: None


def stop_flagcore(tune: Tune, host: str) -> Undo:
    undo = signals(tune.bed, "h0", b"\0".join(map(os.fsencode, FLAG)), signal.SIGSTOP, signal.SIGCONT)
    return lambda: (undo(), tune.process.send_signal(signal.SIGCONT))  # nsenter stops itself with its program


FAULTS: dict[str, Fault] = {
    "cut link": of_bed(Bed.cut, Bed.restore),
    "slow link": of_bed(lambda bed, host: bed.set_rate(host, "40kbit"), lambda bed, host: bed.set_rate(host, "10gbit")),
    "power off": of_bed(Bed.poweroff, Bed.boot),
    "crash": of_bed(Bed.kill, Bed.boot),
    "frozen host": stop(b""),
    "full disk": of_bed(Bed.fill, Bed.unfill),
    "no logins": of_bed(end_logins, lambda bed, host: bed.run(host, SSHD, "-f", str(bed.folder / "sshd_config"))),
    "no address": of_bed(forget, lambda bed, _host: bed.run("h0", "umount", "/etc/hosts")),
    "closed connection": lambda tune, host: signals(tune.bed, "h0", f"\0{host}\0".encode(), signal.SIGKILL),
    "killed agent": kill(b"flagcore_hosts.agent"),
    "stopped agent": stop(b"flagcore_hosts.agent"),
    "killed guard": kill(b"guard.py"),
    "stopped rank": stop(b"train.py"),
    "killed flagcore": kill_flagcore,
    "stopped flagcore": stop_flagcore,
}


def all_clean(bed: Bed, seconds: float = CLEAN_SECONDS, *, everything: bool = False) -> list[tuple[str, bytes]]:
    """Return the orphaned processes, or all processes of trials, after at most some seconds."""
    deadline = time.monotonic() + seconds
    look = bed.processes if everything else bed.orphans
    while True:
        left = [(name, command(pid)) for name in bed.names for pid in look(name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(TUNES))
def test_faults_at_random_moments(number: int, project: Project) -> None:
    bed, draw = project.bed, random.Random(number)
    has_spare = draw.random() < 0.5
    if not has_spare:
        (project.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    project.write_spec(sleeps=0.6, repeats=1, spares=int(has_spare))
    kinds, seconds = draw.sample([*FAULTS], 1 + (number % 3 == 0)), draw.uniform(3.0, 90.0)
    tune = Tune(project)
    hosts = tune.wait_for_a_trial(draw.randrange(4))
    time.sleep(draw.uniform(0.0, 4.0))
    chosen = draw.sample(hosts, len(kinds))
    print(f"{seconds:.0f} s of", *zip(kinds, chosen, strict=True), "with a spare" if has_spare else "")
    undo = [FAULTS[kind](tune, host) for kind, host in zip(kinds, chosen, strict=True)]
    codes, ends_at = list[int](), time.monotonic() + seconds
    while (code := tune.process.poll()) != 0 or undo:
        if time.monotonic() > ends_at:
            for each in undo:
                each()
            undo = []
        if code:
            codes.append(code)
            assert code == HOSTS_LOST or "killed flagcore" in kinds, tune.output()
            assert code != HOSTS_LOST or "resume with `flag tune" in tune.output()
            tune.resume()
        time.sleep(0.1)
    result = project.result()
    print("exit codes:", codes)
    assert all_clean(bed, everything=True) == []
    assert result["best"]["candidate"].items() >= BEST.items(), tune.output()
    assert result["counts"]["measured"] + result["counts"]["stopped"] == result["counts"]["candidates"], tune.output()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


TRAINING = "--train-iters 6 --lr-warmup-iters 1 --bf16 --clip-grad 1.0 --log-interval 1 --eval-iters 0"
CANDIDATES, ITERATIONS = 3, 6


@pytest.mark.timeout(1200)
@needs_megatron_lm
@pytest.mark.parametrize(
    ("launcher", "before", "faults"),
    [
        ("ssh", (), {"killed agent": 0.0, "cut link": 10.0, "power off": 15.0}),
        ("slurm", ("salloc", "--quiet", "--nodes=2", "--exclusive", "--no-kill"), {"killed agent": 0.0}),
        ("ray", ("env",), {"killed agent": 0.0, "killed node": 0.0}),
    ],
)
def test_a_users_torchrun_trains_on_hosts(
    launcher: str, before: tuple[str, ...], faults: dict[str, float], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = project.bed
    if launcher == "slurm":
        bed.need_slurm()
    if launcher == "ray":
        pytest.importorskip("ray")
        before = ("env", f"RAY_ADDRESS={bed.start_ray()}")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    command = ["torchrun", "--nproc-per-node", "1", str(MEGATRON / "pretrain_gpt.py")]
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]}
    control = {"train_iters": 4, "max_trials": CANDIDATES, "max_time_per_task": 200, "compare_hosts": False}
    words = [*command, *ARCHITECTURE.split(), *TRAINING.split()]
    spec = spec_of(project.folder, control=control, space=space, command=words)
    spec["cluster"] = {"chip": "cpu", "memory_per_device": "4GiB", "devices_per_node": 1, "nodes": 2}
    spec["auto_tuner"]["launcher"] = launcher
    if launcher == "ssh":
        (project.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
        spec["cluster"] = {"chip": "cpu", "memory_per_device": "4GiB", "hostfile": "hosts.txt"}
    (project.folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    tune = Tune(project, *before)
    faults_by_name = {**FAULTS, "killed node": kill(b"raylet/raylet")}
    for number, (kind, seconds) in enumerate(faults.items()):
        hosts = tune.wait_for_a_trial(2 * number)  # the trials between them succeed
        time.sleep(8.0)
        undo = faults_by_name[kind](tune, hosts[1].replace(f"{NETWORK}.1", "h"))
        time.sleep(seconds)
        undo()
    result = tune.finish()
    assert tune.resumed == 0, tune.output()
    assert all_clean(bed, everything=True) == []
    assert result["counts"]["measured"] + result["counts"]["stopped"] == CANDIDATES, tune.output()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)
    assert last_iteration(project, before) == ITERATIONS
    assert all_clean(bed, everything=True) == []


KILLS, STEPS = int(os.environ.get("FLAGCORE_KILLS", "20")), 160
"""The number of ranks and hosts that are killed, and the steps of the job."""
GOES_ON = "training continues at step"


def losses(output: str) -> dict[int, float]:
    """Return the loss of each iteration in the output of a job, as it ran last."""
    found = re.findall(r"\] iteration +(\d+)/.*? lm loss: (\S+) ", output)
    return {int(step): float(loss) for step, loss in found}


def ranks(bed: Bed, host: str) -> list[int]:
    """Return the processes of torchrun and its ranks on a host, without those that ranks have forked."""
    found = [pid for pid in bed.processes(host) if b"pretrain_gpt.py" in command(pid)]
    starters = {pid for pid in found if b"torchrun" in command(pid)}
    return [pid for pid in found if pid in starters or (guard.read_ids(pid) or (0,))[0] in starters]


@pytest.mark.timeout(3600)
@needs_megatron_lm
@pytest.mark.parametrize("kinds", [["rank"], ["rank", "rank", "crash", "power off", "cut link"]])
def test_a_job_ends_with_all_its_steps_though_ranks_and_hosts_are_killed(
    kinds: list[str], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those of a job without failures: a restart has the same random states, data and hosts."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    bed, folder, draw = project.bed, project.folder, random.Random(0)
    (folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    is_alone = len(kinds) == 1
    words = [
        "torchrun",
        "--nproc-per-node",
        "2" if is_alone else "1",
        str(MEGATRON / "pretrain_gpt.py"),
        *ARCHITECTURE.split(),
    ]
    words += TRAINING.replace("--train-iters 6", f"--train-iters {STEPS}").split()
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "micro_batch_size": 2}
    space["use_distributed_optimizer"] = False  # saving it needs Transformer Engine's Adam

    def start(name: str, *options: str) -> subprocess.Popen[str]:
        saves = ["--save", str(folder / name), "--load", str(folder / name), "--save-interval", "4"]
        spec = spec_of(folder, control={}, space=space, command=[*words, *saves])
        if not is_alone:
            spec["cluster"] = {"chip": "cpu", "memory_per_device": "4GiB", "hostfile": "hosts.txt"}
            spec["cluster"]["nic_bytes_per_second"] = 1e8
            spec["auto_tuner"]["launcher"] = "ssh"
        (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
        api.tune(folder / "spec.yaml", run_dir=folder / f"plan-{name}", fidelity="estimate")
        with (folder / f"{name}.log").open("w") as log:
            return bed.start("h0", *FLAG, "run", str(folder / f"plan-{name}"), *options, stdout=log, stderr=log)

    def output(name: str) -> str:
        return (folder / f"{name}.log").read_text()

    assert start("whole").wait(1200) == 0, output("whole")[-3000:]
    job = start("killed", f"--restarts={KILLS}", *[] if is_alone else ["--spares=h3"])
    killed, undo = list[tuple[str, str]](), list[Undo]()
    more = draw.randrange(6)
    while len(killed) < KILLS and job.poll() is None:
        text = output("killed")
        since = text.rpartition(GOES_ON)[2] if killed else text
        if text.count(GOES_ON) < len(killed) or since.count("] iteration ") <= more:
            time.sleep(0.1)
            continue
        more = draw.randrange(6)
        for each in undo:
            each()
        bed.boot_all()
        hosts = json.loads((folder / "plan-killed" / "best" / "hosts" / "launch.json").read_text())["hosts"]
        hosts = ["h0"] if is_alone else hosts
        killed.append((draw.choice(kinds), draw.choice(hosts)))
        kind, host = killed[-1]
        if kind == "rank":
            os.kill(draw.choice(ranks(bed, host)), signal.SIGKILL)
        undo = [FAULTS[kind](SimpleNamespace(bed=bed), host)] if kind == "cut link" else []  # type: ignore[arg-type]
        if kind in ("crash", "power off"):
            FAULTS[kind](SimpleNamespace(bed=bed), host)  # type: ignore[arg-type]
    code = job.wait(1200)
    for each in undo:
        each()
    print(*killed, *re.findall("flag: .*", output("killed")), sep="\n")
    assert (code, len(killed)) == (0, KILLS), output("killed")[-3000:]
    assert all_clean(bed, everything=True) == []
    assert losses(output("killed")) == losses(output("whole"))
    assert [*losses(output("whole"))] == [*range(1, STEPS + 1)]


HANGS = """\
import os, pathlib, runpy, sys, time
import torch
whole, steps = torch.optim.AdamW.step, []
def step(self, *others, **named):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 10 and not pathlib.Path("hung").exists():
        pathlib.Path("hung").touch()
        time.sleep(1e6)
    return whole(self, *others, **named)
torch.optim.AdamW.step = step
sys.argv[0] = os.path.join(os.environ["MEGATRON"], "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Megatron-LM's own program, in which a rank hangs once."""


@pytest.mark.timeout(900)
@needs_megatron_lm
def test_a_job_whose_rank_hangs_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    (tmp_path / "pretrain_gpt.py").write_text(HANGS)
    words = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *ARCHITECTURE.split()]
    words += TRAINING.replace("--train-iters 6", "--train-iters 16").split()
    words += ["--save", str(tmp_path / "saves"), "--load", str(tmp_path / "saves"), "--save-interval", "4"]
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "micro_batch_size": 2}
    spec = spec_of(tmp_path, control={}, space={**space, "use_distributed_optimizer": False}, command=words)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    api.tune(tmp_path / "spec.yaml", run_dir=tmp_path / "run", fidelity="estimate")
    words = [*FLAG, "run", str(tmp_path / "run"), "--restarts=2", "--stall=60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--stall" in done.stderr
    assert "training continues at step 9" in done.stderr, done.stderr[-3000:]
    assert [*losses(done.stdout)] == [*range(1, 17)]
    assert not [pid for pid in guard.all_processes() if str(tmp_path).encode() in command(pid)]


def last_iteration(project: Project, before: tuple[str, ...]) -> int:
    """Run the best configuration of a run on its hosts to the end, and return its last iteration."""
    where = project.bed.command("h0", *before, *FLAG, "run", str(project.run_dir))
    where[where.index("--") - 1] = f"--wd={project.folder}"
    done = subprocess.run(where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("iteration")[1] for line in done.stdout.splitlines() if "] iteration" in line]
    return int(lines[-1].split("/")[0])
