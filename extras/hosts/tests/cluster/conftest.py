"""A bed of three hosts, and `flag tune` on it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.hosts.tests.cluster.bed import Bed, need
from flagcore.launchers import guard
from tests.product.cli.conftest import FLAG, SPACE, TRAIN
from tests.product.tasks import SHAPE

SECRET = "hidden-4711"
SPEC: dict[str, Any] = {
    "model": SHAPE,
    "train": {"engine": "megatron", "seq_length": 1024, "global_batch_size": 8, "precision": "bf16"},
    "auto_tuner": {
        "strategy": "predicted",  # goes on to the end of the space
        "space": {**SPACE, "tensor_model_parallel_size": [1, 2]},  # over hosts only if it is listed
    },
}


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    need()
    mine = Bed(tmp_path_factory.mktemp("bed"))
    yield mine
    mine.close()


class Project:
    """A spec whose trials play a training run, in a folder that all hosts share; the run is on h0 alone."""

    def __init__(self, bed: Bed, private: Path) -> None:
        self.bed, self.folder, self.run_dir = bed, bed.folder / private.name, private / "run"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(TRAIN)
        (self.folder / "hosts.txt").write_text("".join(f"{name} slots=1\n" for name in bed.names))

    def write_spec(
        self,
        *,
        sleeps: float = 0.1,
        launcher: str = "ssh",
        trials: int = 20,
        repeats: int = 0,
        compare: bool = False,
        batch: int = 8,
        **cluster: object,
    ) -> None:
        """Write the spec of a tune whose steps take so long."""
        cluster = cluster or {"spares": 1}
        hosts = {"hostfile": "hosts.txt"} if launcher == "ssh" else {"devices_per_node": 1}
        limits = {"train_iters": 3, "max_time_per_task": 30, "max_trials": trials, "repeats": repeats}
        control = {**limits, "compare_hosts": compare}
        spec = {
            **SPEC,
            "cluster": {"chip": "cpu", "memory_per_device": "512MiB", **cluster, **hosts},
            "train": {**SPEC["train"], "global_batch_size": batch, "command": [sys.executable, "-S", "-E", "train.py"]},
            "auto_tuner": {**SPEC["auto_tuner"], "launcher": launcher, "control": control},
            "envs": {"TRAIN_SLEEPS": str(sleeps), "TEST_TOKEN": SECRET},
        }
        (self.folder / "spec.yaml").write_text(yaml.safe_dump(spec))

    def start(self, *before: str) -> subprocess.Popen[str]:
        """Start `flag tune` on h0, after the words `before`; its output goes to a file."""
        words = (*before, *FLAG, "tune", "spec.yaml", "--run-dir", str(self.run_dir))
        with (self.folder / "output").open("a") as output:
            where = self.bed.command("h0", *words)
            where[where.index("--") - 1] = f"--wd={self.folder}"
            return subprocess.Popen(where, stdout=output, stderr=output)

    def result(self) -> Any:
        return json.loads((self.run_dir / "result.json").read_text())


class Tune:
    """`flag tune` on h0, which is started again until it ends well."""

    def __init__(self, project: Project, *before: str) -> None:
        self.project, self.bed, self.before = project, project.bed, before
        self.process, self.resumed = project.start(*before), 0

    def wait_for_a_trial(self, number: int | None = None) -> list[str]:
        """Wait until a trial begins, by default the next one, and return its hosts. A tune that stopped is resumed."""
        if number is None:
            number = 1 + max((int(each.name) for each in self.project.run_dir.glob("trials/*")), default=-1)
        record = self.project.run_dir / "trials" / str(number) / "launch.json"
        deadline = time.monotonic() + 180
        while not record.exists():
            assert time.monotonic() < deadline, self.output()
            if self.process.poll() is not None:
                self.resume()
            time.sleep(0.02)
        return [str(host) for host in json.loads(record.read_text())["hosts"]]

    def resume(self) -> None:
        self.resumed += 1
        assert self.resumed < 8, self.output()
        self.process = self.project.start(*self.before)

    def kill(self) -> None:
        """End flagcore, and nothing else, with SIGKILL."""
        flag = os.fsencode("\0".join(FLAG))
        found = {pid for pid in self.bed.processes("h0") if guard.read_proc(pid, "cmdline").startswith(flag)}
        # the others are about to exec
        (pid,) = {pid for pid in found if not found & {(guard.read_ids(pid) or (0,))[0]}}
        os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> Any:
        """Return the result of the tune."""
        while self.process.wait():
            self.resume()
        return self.project.result()

    def output(self) -> str:
        return (self.project.folder / "output").read_text()


@pytest.fixture
def project(bed: Bed, tmp_path: Path) -> Iterator[Project]:
    yield Project(bed, tmp_path)
    bed.boot_all()
