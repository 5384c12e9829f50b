"""`flag` as a user runs it: in this process where that is enough, else in one of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.cli import main
from flagcore.launchers import guard
from tests.product import tasks

SERVER = Path(__file__).parents[3] / "engines" / "serving" / "tests" / "trial" / "server.py"
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
TRAIN = '''\
"""Plays a training run: prints what Megatron would print, as fast as the knobs make it."""
import os, sys, time

def knob(name):
    return int(os.environ["FLAGCORE_" + name.upper()] or 0)

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
            time.sleep(0.02)
    if what == "vanish":
        import shutil
        shutil.rmtree(sys.argv[1])
        sys.exit(0)
    if what == "disk":
        with open(sys.argv[1] + "/big", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 3 << 30)
        time.sleep(600)

def step_ms():
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
    tensor, pipeline, micro = map(knob, sizes)
    return 100 * {1: 1.5, 2: 1.0, 4: 1.2, 8: 1.3}[micro] * {(1, 1): 1.3, (2, 1): 1.0, (1, 2): 1.4}[tensor, pipeline]

if os.environ.get("TRAIN_WHEN", "1") in ("1", f"{knob('tensor_model_parallel_size')}x{knob('micro_batch_size')}"):
    do(os.environ.get("TRAIN_DOES", ""))
print(f"cores {sorted(os.sched_getaffinity(0))}")
print(f"  micro_batch_size ................................ {knob('micro_batch_size')}")
for step in range(1, 4):
    time.sleep(float(os.environ.get("TRAIN_SLEEPS", "0")))
    print(f" iteration {step:8}/{3:8} | consumed samples: {step * 8:12} | elapsed time per iteration (ms): "
          f"{step_ms() + step:.1f} | learning rate: 1.000000E-04 | lm loss: 7.0E+00 | number of nan iterations:   0 |",
          flush=True)
'''
BEST = {"tensor_model_parallel_size": 2, "micro_batch_size": 2}


@dataclass(frozen=True)
class Ran:
    """One call of `flag`: its exit status, stdout and stderr."""

    code: int
    out: str
    err: str


Flag = Callable[..., Ran]
"""Calls `flag` in this process: see the fixture."""
Answer = Callable[..., Any]
"""Calls a command, and returns its output as JSON: see the fixture."""


def _catch_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Project:
    """A folder with a spec whose trials play a training run; `mark` is in the environment of each of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.run_dir = folder / "run"
        (folder / "train.py").write_text(TRAIN)

    def spec(self, *, does: str = "", when: str = "1", sleeps: float = 0, **sections: Any) -> str:
        """Write `spec.yaml` and return its path. `sections` are put over the usual ones, one level deep."""
        control = {"train_iters": 3, "max_time_per_task": 20, "max_trials": 20}
        default: dict[str, Any] = {
            "model": MODEL,
            "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "512MiB"},
            "train": {
                "engine": "megatron",
                "seq_length": 1024,
                "global_batch_size": 8,
                "precision": "bf16",
                "command": [sys.executable, "-S", "-E", str(self.folder / "train.py"), "{folder}"],
            },
            "auto_tuner": {
                "strategy": "predicted",  # goes on to the end of the space or of the budget
                "space": SPACE,
                "control": {**control, **sections.pop("control", {})},
            },
            "envs": {"TEST_MARK": self.mark, "TRAIN_DOES": does, "TRAIN_WHEN": when, "TRAIN_SLEEPS": str(sleeps)},
        }
        for name, section in sections.items():
            default[name] = {**default[name], **section} if isinstance(section, dict) and name in default else section
        path = self.folder / "spec.yaml"
        path.write_text(yaml.safe_dump(default))
        return str(path)

    def served(self, *, behaviour: str = "known", engine: object = "llamacpp", **sections: Any) -> str:
        """Write the spec of a server of known speed, and return its path.

        Fastest is `parallel` 4, whose first tokens come late; then come 2 and 1. `sections` are put over the usual
        ones, one level deep; those that are no section are keys of `auto_tuner`.
        """
        (self.folder / "weights.gguf").touch()
        control = {"max_time_per_task": 60, "repeats": 0, **sections.pop("control", {})}
        serve = {
            "engine": engine,
            "command": [sys.executable, str(SERVER), behaviour],
            **({"weights": "weights.gguf"} if engine != "acme" else {}),
            "profile": {"input_len": 16, "output_len": 8, "num_prompts": 4, "concurrency": 4},
            **sections.pop("serve", {}),
        }
        data = {
            "model": MODEL,
            "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB"},
            "serve": serve,
            "envs": {"TEST_MARK": self.mark, **sections.pop("envs", {})},
            "auto_tuner": {
                "strategy": "predicted",  # goes on to the end of the space
                "baseline": {"parallel": 1},
                "space": {"parallel": [1, 2, 4]},
                "control": control,
                **sections,
            },
        }
        path = self.folder / "spec.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

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

    def processes(self) -> list[int]:
        """Return what still runs of this project."""
        word = f"TEST_MARK={self.mark}\0".encode()
        return [pid for pid in guard.all_processes() if word in guard.read_proc(pid, "environ")]

    def all_gone(self, seconds: float = 10) -> bool:
        """Return whether no process is left after at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.processes()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    new_project = Project(tmp_path)
    yield new_project
    for pid in new_project.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory, _no_calibration: None) -> Path:
    """A run of five trials with its repeats, made once."""
    made_project = Project(tmp_path_factory.mktemp("finished"))
    api.tune(made_project.spec(control={"max_trials": 5}), run_dir=made_project.run_dir)
    assert made_project.all_gone()
    return made_project.run_dir


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
        ran = flag(*map(str, arguments), "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return call
