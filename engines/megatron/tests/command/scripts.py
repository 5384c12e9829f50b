"""Small jobs of Megatron-LM as shell scripts, and specs that start them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flagcore_megatron.program.user_command import user_command
from flagcore_training.commands import UserCommand

from flagcore.domain.spec import Control, Spec
from tests.checks import given
from tests.product import tasks

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 8"
LAUNCH = f"torchrun --nproc_per_node 4 pretrain_gpt.py {MODEL}"


def spec_of(
    command: Sequence[str], folder: Path, *, envs: Mapping[str, str] | None = None, steps: int = 5, **train: object
) -> Spec:
    """A spec of four devices whose trials run a command in a folder."""
    task = tasks.task(control=Control(train_iters=steps), command=tuple(command), directory=str(folder), **train)
    return replace(task.spec, envs=dict(envs or {}))


def read(text: str, folder: Path, *arguments: str, **envs: str) -> UserCommand:
    """What a script starts. Raises SpecError."""
    (folder / "run.sh").write_text(text)
    (folder / "pretrain_gpt.py").touch()
    return given(user_command(spec_of(("bash", "run.sh", *arguments), folder, envs=envs)))
