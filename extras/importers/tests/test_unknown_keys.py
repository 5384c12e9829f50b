"""A key that no table knows is named by each importer, whatever its value and section."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers.command import read_command

from flagcore import api
from flagcore.contracts import ImportedSpec
from flagcore.errors import SpecError

CASES: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("unknown_keys.yaml").read_text())
VALUES = ("true", "false", "17", "null")
NAMES = ("turbo_mode", "zorblax", "quux_size", "flurb")


def nested(content: Mapping[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """The sections of a mapping with dotted keys."""
    for key, value in content.items():
        *sections, last = key.split(".")
        section = into
        for name in sections:
            section = section.setdefault(name, {})
        if isinstance(value, dict):
            nested(value, section.setdefault(last, {}))
        else:
            section[last] = value
    return into


def imported(case: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> ImportedSpec:
    """The spec of a case, with further keys and their values."""
    is_toml, is_file = case["shape"].startswith("{} ="), bool(case.get("files"))
    written = [
        case["shape"].format(key.rpartition(".")[2] if is_toml else key, value if is_file else value.title())
        for key, value in given.items()
    ]
    for name, text in case.get("files", {}).items():
        content = text.replace("{}", (", " if name.endswith(".json") else "\n").join(written))
        if not is_toml:
            data = nested(yaml.safe_load(content), {})
            content = json.dumps(data) if name.endswith(".json") else yaml.safe_dump(data)
        (folder / name).write_text(content)
    for name in ("model.gguf", "train.py"):
        (folder / name).touch()
    if case["command"] == "bridge":
        return api.read_tree(folder, "own.yaml", importer="bridge")
    return read_command(None, [case["command"].replace("{}", " ".join(written))], chip="H100-SXM")


def named(case: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> set[str]:
    """The keys that an import names, with underscores."""
    try:
        keys = [note.key for note in imported(case, given, folder).notes]
    except SpecError as error:  # unknown flags of servers are refused
        keys = [each.key for each in error.problems]
    return {name.strip(" -").replace("-", "_") for key in keys for name in key.split(",")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_no_table_knows_is_named(name: str, folder: Path) -> None:
    case = CASES[name]
    values = VALUES[:3] if case["shape"].startswith("{} =") else VALUES  # TOML has no null
    given = {
        pattern.format(NAMES[place % len(NAMES)]): values[place % len(values)]
        for place, pattern in enumerate(case["keys"])
    }
    assert {key.lstrip("+").replace("-", "_") for key in given} <= named(case, given, folder)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("verl", {"actor_rollout_ref.actor.fsdp_config.param_offload": "true"}),
        ("verl", {"actor_rollout_ref.ref.fsdp_config.param_offload": "true"}),
        ("verl", {"actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "false"}),
        ("verl", {"actor_rollout_ref.actor.optim.optimizer": "sgd"}),
        ("verl", {"reward_model.enable": "true"}),
        ("axolotl", {"flash_attention": "true"}),
        ("axolotl on DeepSpeed", {"torch_compile": "true", "fsdp_config.offload_params": "true"}),
        ("LLaMA-Factory", {"pure_bf16": "true"}),
        ("OpenRLHF", {"ds.zero_stage": "2"}),
    ],
)
def test_a_known_key_that_a_job_does_not_model_is_named(name: str, given: dict[str, str], folder: Path) -> None:
    assert given.keys() <= named(CASES[name], given, folder)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("verl", {"actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "true", "trainer.val_only": "false"}),
        ("verl", {"actor_rollout_ref.actor.optim.optimizer": "AdamW", "reward_model.enable": "false"}),
        ("axolotl", {"torch_compile": "true", "wandb_project": "own", "tf32": "true", "sage_attention": "false"}),
        ("LLaMA-Factory", {"overwrite_cache": "true", "use_galore": "false"}),
    ],
)
def test_a_key_that_is_modelled_harmless_or_off_is_not_named(name: str, given: dict[str, str], folder: Path) -> None:
    assert not given.keys() & named(CASES[name], given, folder)


def test_the_last_value_of_a_key_counts(folder: Path) -> None:
    words = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_batch_size=64"
    data = read_command(None, [f"{words} data.train_batch_size=32 +trainer.nnodes=2"], chip="H100-SXM").data
    assert (data["rl"]["prompts"], data["cluster"]["nodes"]) == (32, 2)
    removed = read_command(None, [f"{words} ~data.train_batch_size"], chip="H100-SXM").data
    assert removed["rl"]["prompts"] == 1024
