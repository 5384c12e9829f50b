"""Assertions that many tests share: refused keys, counts of a run that add up, and trials that were stored once.
Times of collectives. Secrets that tests plant in inputs, and where other users can read them. Processes that a test
marks in their environment, the ends of trials, and programs that stand for others."""

import json
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from flagcore.contracts import CollectiveCosts, RunningLaunch
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.launch import Exit
from flagcore.errors import SpecError
from flagcore.launchers import guard
from flagcore.plugins import LoadedPlugins

Value = TypeVar("Value")


@contextmanager
def refuses(key: str, *value: object, match: str | None = None) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Assert that a key is refused, with this value if one is given."""
    with pytest.raises(SpecError, match=match) as error:
        yield error
    assert (error.value.key, *[error.value.value for _ in value]) == (key, *value)


def given(value: Value | None) -> Value:
    """Return a value that must not be None."""
    assert value is not None
    return value


def collectives(plugin: object, chip: str, nodes: int = 1, devices_per_node: int = 8) -> CollectiveCosts:
    """Return what a vendor's plugin says of collectives between nodes of a chip."""
    loaded = LoadedPlugins.of({"vendor": plugin})
    group = NodeGroup(chip=given(loaded.find_chip(chip)), nodes=nodes, devices_per_node=devices_per_node)
    return given(loaded.collective_costs(group, "megatron"))


def collective_seconds(costs: CollectiveCosts, kind: str, payload: float, ranks: int, stride: int = 1) -> float:
    """Return the time of a collective of `payload` bytes among `ranks` devices, each `stride` after the one before."""
    return float(costs.seconds(kind, np.array([float(payload)]), np.array([ranks]), np.array([stride]))[0])


def books_balance(result: Any) -> bool:
    counts = result["counts"]
    completed = counts["measured"] + counts["stopped"] + counts["failed"]
    settled = counts["does_not_fit"] + sum(counts["pruned"].values()) + completed
    return (
        counts["combinations"] == sum(counts["illegal"].values()) + counts["merged"] + counts["candidates"]
        and counts["candidates"] == settled + counts["untried"]
        and completed == len(result["trials"])
    )


def check_kept_once(run_dir: Path, result: Any) -> None:
    """Assert that every finished trial of the journal was written once, and that the result has those measured."""
    stored: dict[int, Any] = {}
    for line in map(json.loads, (run_dir / "journal.log").read_text().splitlines()):
        done = line.get("user_attr", {}).get("result") if "trial_id" in line else None
        if done is not None:
            assert line["trial_id"] not in stored, "a finished trial was written twice"
            stored[line["trial_id"]] = done
    shown = [*result["trials"], *result["repeats"]]
    numbers = [trial["number"] for trial in shown]
    assert len(set(numbers)) == len(numbers)
    measured = {number for number, trial in stored.items() if trial["state"] == "measured"}
    assert {trial["number"] for trial in shown if trial["state"] == "measured"} == measured


MARK = "Xq7Z"
"""Part of each planted secret."""


def secret(number: int) -> str:
    """Return a secret that has no known format."""
    return f"{MARK}{number:02}pVt9Lm3kW2cRb8"


NAMES = (
    *("MY_PASSWORD", "WANDB_API_KEY", "AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DB_PW", "HF_TOKEN_2"),
    *("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "MODELARTS_SK", "FEISHU_WEBHOOK", "REDISCLI_AUTH", "COOKIE"),
    *("AZURE_STORAGE_CONNECTION_STRING", "NGC_CLI_API_KEY"),
)
VARIABLES = {
    **{name: secret(number) for number, name in enumerate(NAMES)},
    "PAT": f"ghp_{secret(20)}x",  # values show that these are secrets
    "UPSTREAM": f"mysql://me:{secret(21)}@db/x",
    "CACHE": f"redis://:{secret(22)}@cache:6379/0",
    "HEADERS": f"Authorization: Bearer {secret(23)}",
    "OPTIONS": f"--port 80 --admin-api-key {secret(24)}",
    "CONFIG": f'{{"client": {{"apiKey": "{secret(25)}"}}}}',
    "DOWNLOAD": f"https://store/x?sv=1&sig={secret(26)}&user_token={secret(27)}",
    "HOOK": f"https://open.feishu.cn/open-apis/bot/v2/hook/{secret(28)}",
}
"""Environment variables of a spec."""
WORDS = (
    *("--wandb-key", secret(40)),
    f"--registry-password={secret(41)}",
    *("-H", f"X-Api-Key: {secret(42)}"),
    *("-u", f"me:{secret(43)}"),
    *("--config", f'{{"access_key_secret": "{secret(44)}", "n": 1}}'),
    *("--data", f"s3://AKIAABCDEFGHIJKLMNOP:{secret(45)}@bucket/x"),
    *("--env", f"HF_TOKEN={secret(46)}"),
    f"+logger.api_key={secret(47)}",
    *("--headers", f'{{"Authorization": "Basic {secret(48)}"}}'),
)
"""Arguments of a command."""
SHELL = {
    "OPENAI_API_KEY": secret(60),
    "TENCENTCLOUD_SECRET_KEY": secret(61),
    "GIT_REMOTE": f"https://{secret(62)}@h/x.git",
}
"""Variables of the shell that starts flagcore."""


def exposed_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that other users can read."""
    for each in folder.iterdir():
        if stat.S_IMODE(each.lstat().st_mode) & 0o077 and not each.is_symlink():
            yield from exposed_files(each) if each.is_dir() else (each,)


def leaks(text: str, context: int = 40) -> Sequence[str]:
    """Return the text around each planted secret in a text."""
    return [f"{before[-context:]}{MARK}{after[:context]}" for before, after in pairwise(text.split(MARK))]


def leaking_files(folder: Path, inputs: Collection[str] = ()) -> dict[str, Sequence[str]]:
    """Return the text around each planted secret, by the file below a folder, except `inputs`, that exposes it."""
    texts = {
        str(each.relative_to(folder)): each.read_bytes().decode(errors="replace") for each in exposed_files(folder)
    }
    return {name: found for name, text in texts.items() if name not in inputs and (found := leaks(text))}


TEST_MARK = "TEST_MARK"


def marked(word: str) -> set[int]:
    """Return the processes with TEST_MARK=word in their environment."""
    text = f"{TEST_MARK}={word}\0".encode()
    return {pid for pid in guard.all_processes() if text in guard.read_proc(pid, "environ")}


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Return whether a condition comes true within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ended(running: RunningLaunch, seconds: float = 30.0) -> Exit:
    """Return the exit of a trial, which must end within some seconds."""
    found = running.wait(seconds)
    assert found is not None, "the trial has not ended"
    return found


def family(pid: int) -> tuple[int, int, int, bytes]:
    """Return the parent, the process group, the session and the state of a process that runs."""
    found = guard.read_ids(pid)
    assert found is not None
    return found


def program(file: Path, script: str, shell: str = "/bin/bash") -> Path:
    """Write a program that runs a script, with the folder that it is in, and return it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{shell}\n{script}\n")
    file.chmod(0o755)
    return file
