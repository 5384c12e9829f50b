"""`flag` as a user runs it: in this process where that is enough, else in one of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_testing import toy, toy_program

from flagcore import api
from flagcore.cli import main
from flagcore.plugins import kind_of
from tests import tasks
from tests.checks import marked, within

FLAG = (sys.executable, "-c", "from flagcore.cli import main; main()")
MODEL = {
    "name": "tiny",
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
SPACE = {**tasks.PLAIN_SPACE, "micro_batch_size": [1, 2, 4]}
DO = """\
import json, os, runpy, sys, time

def do(what):
    if what == "crash":
        sys.exit("ValueError: it is broken" if what else "")
    if what == "hang":
        os.environ.get("TEST_MARK") and os.fork()
        time.sleep(600)
    if what == "binary":
        sys.stdout.buffer.write(bytes(range(256)) * 1000)
        sys.exit(3)
    if what == "oom":
        hog = []
        while True:
            hog.append(b"x" * (64 << 20))
            time.sleep(0.1)
    if what == "vanish":
        import shutil
        shutil.rmtree(folder)
        sys.exit(0)
    if what == "disk":
        with open(folder + "/big", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 3 << 30)
        time.sleep(600)
"""
"""How a trial ends, in its folder."""
TRAIN = f'''\
"""Plays a training run: fails as the variables say, or does what the toy's program does."""
{DO}
folder = sys.argv[-1]
with open(folder + "/job.json") as file:
    knobs = json.load(file)["knobs"]
if os.environ["TRAIN_WHEN"] in ("1", f"{{knobs['tensor_model_parallel_size']}}x{{knobs['micro_batch_size']}}"):
    do(os.environ["TRAIN_DOES"])
print(f"cores {{sorted(os.sched_getaffinity(0))}}", flush=True)
sys.argv = [sys.argv[1], folder]
runpy.run_path(sys.argv[0], run_name="__main__")
'''
BEST = {"tensor_model_parallel_size": 2, "micro_batch_size": 2}


@dataclass(frozen=True)
class Ran:
    """One call of `flag`: its exit status, stdout and stderr."""

    code: int
    out: str
    err: str

    def worked(self) -> "Ran":
        """Assert that it succeeded."""
        assert self.code == 0, self.err + self.out
        return self

    def refused(self, code: int, *words: str) -> "Ran":
        """Assert that it printed no result, but a message with all the words."""
        assert (self.code, self.out, "Traceback" in self.err) == (code, "", False), self.err
        assert [word for word in words if word not in self.err] == [], self.err
        return self


Flag = Callable[..., Ran]
"""Calls `flag` in this process: see the fixture."""
Answer = Callable[..., Any]
"""Calls a command, and returns its output as JSON: see the fixture."""


def _catch_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Project:
    """A folder with a spec whose trials play a training run; `mark` is in the environment of each of its processes."""

    train = TRAIN

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.run_dir = folder / "run"
        (folder / "train.py").write_text(self.train)

    def spec(self, *, does: str = "", when: str = "1", sleeps: float = 0, **sections: Any) -> str:
        """Write `spec.yaml` and return its path. `sections` are put over the usual ones, one level deep."""
        control = {"train_iters": 3, "max_time_per_task": 20, "max_trials": 20}
        job = self.job(sleeps)
        default: dict[str, Any] = {
            "model": MODEL,
            "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "512MiB"},
            "train": job["train"],
            "auto_tuner": {
                "strategy": "predicted",  # goes on to the end of the space or of the budget
                "space": job["space"],
                "control": {**control, **sections.pop("control", {})},
            },
            "envs": {"TEST_MARK": self.mark, "TRAIN_DOES": does, "TRAIN_WHEN": when, "TRAIN_SLEEPS": str(sleeps)},
        }
        for name, section in sections.items():
            default[name] = {**default[name], **section} if isinstance(section, dict) and name in default else section
        path = self.folder / "spec.yaml"
        path.write_text(yaml.safe_dump(default))
        return str(path)

    def job(self, sleeps: float) -> dict[str, Any]:
        """Return the section `train`, and the space."""
        command = [sys.executable, "-S", "-E", str(self.folder / "train.py"), toy_program.__file__]
        job = {"engine": "toy", "seq_length": 1024, "global_batch_size": 8, "precision": "bf16", "command": command}
        return {"train": {**job, "settings": {"sleeps": sleeps}}, "space": SPACE}

    def result(self) -> Any:
        return json.loads((self.run_dir / "result.json").read_text())

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start `flag` in a separate process, which Ctrl-C interrupts even if pytest runs in the background."""
        paths = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), os.environ["PYTHONPATH"]]))
        return subprocess.Popen(
            [*FLAG, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "TEST_MARK": self.mark, **environment, "PYTHONPATH": paths},
            preexec_fn=_catch_interrupts,
        )

    def run(self, *arguments: str, **environment: str) -> Ran:
        """Run `flag` in a separate process."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        return Ran(process.returncode, out, err)

    def processes(self) -> set[int]:
        """Return what still runs of this project."""
        return marked(self.mark)

    def all_gone(self, seconds: float = 10) -> bool:
        """Return whether no process is left after at most `seconds`."""
        return within(seconds, lambda: not self.processes())

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def made(project: Project) -> Path:
    """Tune five trials and their repeats, and return the folder of the run."""
    api.tune(project.spec(control={"max_trials": 5}), run_dir=project.run_dir)
    assert project.all_gone()
    return project.run_dir


@contextlib.contextmanager
def toy_installed(folder: Path) -> Iterator[None]:
    """Install the toy engine for this process and those that it starts."""
    toy.install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ["PYTHONPATH"])))
        kind_of.cache_clear()
        yield
    kind_of.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with toy_installed(tmp_path_factory.mktemp("toy")):
        yield


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    new_project = Project(tmp_path)
    yield new_project
    new_project.kill()


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory, _no_calibration: None) -> Path:
    """A run of five trials with its repeats, made once."""
    with toy_installed(tmp_path_factory.mktemp("toy")):
        return made(Project(tmp_path_factory.mktemp("finished")))


@pytest.fixture
def finished(made_run: Path, project: Project) -> Project:
    """A project with a copy of a finished run of five trials."""
    project.spec(control={"max_trials": 5})
    shutil.copytree(made_run, project.run_dir)
    return project


@pytest.fixture
def flag(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Flag]:
    """Call the command line in this process."""
    monkeypatch.chdir(tmp_path)
    handlers_before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capfd.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    yield call
    for number, handler in handlers_before.items():
        signal.signal(number, handler)


@pytest.fixture
def answer(flag: Flag) -> Answer:
    """Call a command that succeeds, and return its output as JSON."""

    def call(*arguments: object) -> Any:
        return json.loads(flag(*map(str, arguments), "--json").worked().out)

    return call
