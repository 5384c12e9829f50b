"""Runs of every kind, made once with `flag tune` and trials that play a training run, or servers of known speed."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.contracts import Event
from flagcore.errors import EveryTrialFailed, Interrupted
from flagcore.i18n import choose
from tests.page_reading import Read, read
from tests.product.cli.conftest import MODEL, Project
from tests.product.cli.conftest import answer as answer
from tests.product.cli.conftest import flag as flag
from tests.product.cli.conftest import project as project

EXPERTS = {**MODEL, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256}
HOSTILE = "</script><script>alert('log')</script> <img src=x onerror=alert(1)> a|b `c` \x1b[31mred\x1b[0m \x07"
BROKEN = f"""\
import os, sys
print({HOSTILE!r})
sys.exit("ValueError: </pre><b>it is</b> | broken in process " + str(os.getpid()))
"""
MESHES = "old pp2 + new dp2"
FINISHED = ("dense", "pipeline", "experts", "serving", "engines", "resumed", "estimate")
SERVED = ("serving", "engines")
KINDS = (*FINISHED, "mixed", "failed", "interrupted", "killed")


@dataclass(frozen=True)
class Made:
    """A run's folder and, as read back, its result and its page."""

    folder: Path
    result: dict[str, Any]
    html: str
    page: Read


class Runs:
    """Makes each kind of run once, and its page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.projects: list[Project] = []
        self.made: dict[str, Made] = {}

    def __call__(self, kind: str) -> Made:
        if kind not in self.made:
            if kind == "serving":
                run_folder = self("engines").folder / "llamacpp"
            else:
                run_folder = self.folder / kind / "run"
                getattr(self, kind)(run_folder)
            html = api.report(run_folder)
            result = run_folder / "result.json"
            data = json.loads(result.read_text()) if result.exists() else {}
            self.made[kind] = Made(run_folder, data, html, read(html))
        return self.made[kind]

    def chinese(self, kind: str) -> str:
        """Return the page of a kind of run as a Chinese reader gets it."""
        report = self(kind)
        choose("zh")
        try:
            return api.report(report.folder)
        finally:
            choose("")

    def project(self, where: Path) -> Project:
        where.parent.mkdir(parents=True)
        project = Project(where.parent)
        self.projects.append(project)
        return project

    def dense(self, where: Path) -> None:
        api.tune(self.project(where).spec(control={"repeats": 2}), run_dir=where)

    def pipeline(self, where: Path) -> None:
        project = self.project(where)
        space = {"pipeline_model_parallel_size": [2], "micro_batch_size": [1, 2]}
        api.tune(project.spec(auto_tuner={"space": space, "strategy": "predicted"}), run_dir=where)

    def experts(self, where: Path) -> None:
        api.tune(self.project(where).spec(model=EXPERTS, control={"repeats": 0}), run_dir=where)

    def estimate(self, where: Path) -> None:
        api.tune(self.project(where).spec(control={"max_trials": 4}), run_dir=where, fidelity="estimate")

    def mixed(self, where: Path) -> None:
        """Groups of different speed, with two stages on the slow one."""
        path = Path(self.project(where).spec())
        spec = yaml.safe_load(path.read_text())
        del spec["train"]["command"]
        group = {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB", "nic_bytes_per_second": 1e9}
        spec["cluster"] = {"groups": [{**group, "name": "new"}, {**group, "name": "old", "speed": 0.5}]}
        spec["auto_tuner"] = {"baseline": {"meshes": MESHES, "micro_batch_size": 2}, "space": {"meshes": [MESHES]}}
        path.write_text(yaml.safe_dump(spec))
        api.tune(str(path), run_dir=where, fidelity="estimate")

    def failed(self, where: Path) -> None:
        project = self.project(where)
        (project.folder / "train.py").write_text(BROKEN)
        with pytest.raises(EveryTrialFailed):
            api.tune(project.spec(control={"max_trials": 3}), run_dir=where)

    def interrupted(self, where: Path) -> None:
        project = self.project(where)
        ended: list[int] = []

        def stop(event: Event) -> None:
            if event.kind == "trial_finished":
                ended.append(event.trial.number)
                if len(ended) == 2:
                    raise KeyboardInterrupt

        with pytest.raises(Interrupted):
            api.tune(project.spec(), run_dir=where, on_event=stop)

    def resumed(self, where: Path) -> None:
        shutil.copytree(self("interrupted").folder, where)
        api.tune(self("interrupted").folder.parent / "spec.yaml", run_dir=where)

    def killed(self, where: Path) -> None:
        shutil.copytree(self("interrupted").folder, where)
        for name in ("result.json", "insight.json", "report.html", "report.txt"):
            (where / name).unlink()
        for name in ("best", "best.sh", "best.yaml"):
            removed_file = where / name
            shutil.rmtree(removed_file) if removed_file.is_dir() else removed_file.unlink()

    def engines(self, where: Path) -> None:
        serve, envs = {"slo": {"ttft_s": {"p99": 100.0}}}, {"HF_TOKEN": "a-secret-of-mine"}
        engine = ["llamacpp", "vllm"]
        space = {"parallel": [1, 4]}
        spec = self.project(where).served(behaviour="brief", engine=engine, serve=serve, envs=envs, space=space)
        api.tune(spec, run_dir=where)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    all_runs = Runs(tmp_path_factory.mktemp("runs"))
    yield all_runs
    assert all(project.all_gone() for project in all_runs.projects)


@pytest.fixture
def copied(runs: Runs, tmp_path: Path) -> Callable[..., Path]:
    """Copy a run; `change` may change the content of its result.json."""

    def copy(kind: str, change: Callable[[dict[str, Any]], object] | None = None) -> Path:
        folder = shutil.copytree(runs(kind).folder, tmp_path / kind)
        if change:
            data = json.loads((folder / "result.json").read_text())
            change(data)
            (folder / "result.json").write_text(json.dumps(data))
        return folder

    return copy


@pytest.fixture
def edited(copied: Callable[..., Path]) -> Callable[..., Read]:
    """Return the page of a copy of a run whose result.json is changed."""
    return lambda kind, change: read(api.report(copied(kind, change)))
