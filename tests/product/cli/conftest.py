"""`flag` as in `tests/cli`, in projects that train with a command of Megatron's kind, and that serve."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli import conftest as core
from tests.cli.conftest import BEST as BEST
from tests.cli.conftest import FLAG as FLAG
from tests.cli.conftest import MODEL as MODEL
from tests.cli.conftest import Answer as Answer
from tests.cli.conftest import Flag as Flag
from tests.cli.conftest import Ran as Ran
from tests.cli.conftest import answer as answer
from tests.cli.conftest import finished as finished
from tests.cli.conftest import flag as flag
from tests.product import tasks

SERVER = Path(__file__).parents[3] / "engines" / "serving" / "tests" / "trial" / "server.py"
SPACE = {**tasks.PLAIN_SPACE, "micro_batch_size": [1, 2, 4]}
TRAIN = f'''\
"""Plays a training run: prints what Megatron would print, as fast as the knobs make it."""
{core.DO}
folder = (*sys.argv, "")[1]

def knob(name):
    return int(os.environ["FLAGCORE_" + name.upper()] or 0)

def step_ms():
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
    tensor, pipeline, micro = map(knob, sizes)
    return 100 * {{1: 1.5, 2: 1.0, 4: 1.2, 8: 1.3}}[micro] * {{(1, 1): 1.3, (2, 1): 1.0, (1, 2): 1.4}}[tensor, pipeline]

if os.environ.get("TRAIN_WHEN", "1") in ("1", f"{{knob('tensor_model_parallel_size')}}x{{knob('micro_batch_size')}}"):
    do(os.environ.get("TRAIN_DOES", ""))
print(f"cores {{sorted(os.sched_getaffinity(0))}}")
print(f"  micro_batch_size ................................ {{knob('micro_batch_size')}}")
for step in range(1, 4):
    time.sleep(float(os.environ.get("TRAIN_SLEEPS", "0")))
    print(f" iteration {{step:8}}/{{3:8}} | consumed samples: {{step * 8:12}} | elapsed time per iteration (ms): "
          f"{{step_ms() + step:.1f}} | learning rate: 1.000000E-04 | lm loss: 7.0E+00 | "
          "number of nan iterations:   0 |", flush=True)
'''


class Project(core.Project):
    """A folder with a spec whose trials print what Megatron would print, or that start servers."""

    train = TRAIN

    def job(self, sleeps: float) -> dict[str, Any]:
        command = [sys.executable, "-S", "-E", str(self.folder / "train.py"), "{folder}"]
        train = {
            "engine": "megatron",
            "seq_length": 1024,
            "global_batch_size": 8,
            "precision": "bf16",
            "command": command,
        }
        return {"train": train, "space": SPACE}

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


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    new_project = Project(tmp_path)
    yield new_project
    new_project.kill()


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory, _no_calibration: None) -> Path:
    """A run of five trials with its repeats, made once."""
    return core.made(Project(tmp_path_factory.mktemp("finished")))
