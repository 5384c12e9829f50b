"""Which release of Megatron-LM a command runs, and flags against the argument table of every release."""

import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_megatron.program.user_command import find_release
from flagcore_megatron.space.flags import flags
from flagcore_megatron.space.knobs import BY_NAME, KNOBS

from flagcore.domain.knob import in_versions
from flagcore.domain.spec import SettingValue
from flagcore.errors import SpecErrors
from tests.product import tasks

INFO = """\
MAJOR = {}
MINOR = {}
PATCH = {}
PRE_RELEASE = 'rc5'
"""


def tree(folder: Path, release: str, arguments: str = "") -> Path:
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(INFO.format(*release.split(".")))
    (folder / "megatron" / "training" / "arguments.py").write_text(arguments)
    (folder / "pretrain_gpt.py").touch()
    return folder


@pytest.mark.parametrize(
    ("program", "folder", "expected"),
    [
        ("own/pretrain_gpt.py", ".", "0.14.0"),
        ("pretrain_gpt.py", "own", "0.14.0"),
        ("fork/pretrain_gpt.py", ".", "0.15.0+flagscale"),
        ("unnamed/pretrain_gpt.py", ".", "0.12.3"),
    ],
)
def test_the_tree_of_the_program_counts_before_pythonpath(
    program: str, folder: str, expected: str, tmp_path: Path
) -> None:
    tree(tmp_path / "own", "0.14.0")
    tree(tmp_path / "fork", "0.15.0", "# FlagScale Begin")
    (tree(tmp_path / "unnamed", "0.13.0") / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")
    other = tree(tmp_path / "other", "0.12.3")
    assert find_release(str(tmp_path / folder), program, None, str(other)) == expected


def test_a_program_elsewhere_has_the_release_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "other", "0.12.3")
    assert find_release(str(tmp_path), "train.py", None, "nothing:other") == "0.12.3"
    assert find_release(str(tree(tmp_path / "own", "0.14.0")), "examples/mimo/train.py", None, "") == "0.14.0"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    assert find_release(str(tmp_path), None, None) == "0.12.3"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
def test_without_a_tree_the_installed_package_counts(tmp_path: Path) -> None:
    assert find_release(str(tmp_path), "train.py", None, "") == version("megatron-core")


def test_another_interpreter_is_queried_and_an_unusable_one_gives_no_release(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    package = tmp_path / "packages" / "megatron_core-0.13.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.13.1\n")
    assert find_release(str(tmp_path), "train.py", str(python), str(package.parent)) == "0.13.1"
    assert find_release(str(tmp_path), "train.py", str(tmp_path / "missing"), "") is None


RELEASES = (*known_releases(), "0.15.0+flagscale")


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_the_flags_that_its_parser_has(release: str) -> None:
    flags = [(flag, name) for knob in KNOBS for flag in knob.flags for name in (flag.name, flag.off) if name]
    in_parser = [name for _, name in flags if f"--{name}" in release_table(release).by_flag]
    assert [name for flag, name in flags if in_versions(flag.versions, release)] == in_parser


@pytest.mark.parametrize("release", RELEASES)
def test_a_switch_sets_the_value_in_its_name(release: str) -> None:
    for knob, value in product((knob for knob in KNOBS if knob.kind == "flag"), (True, False)):
        found = release_table(release).effective(knob.arguments(value, release))
        assert set(found) <= {knob.name, "use_custom_fsdp", "grad_reduce_in_bf16", "overlap_p2p_comm"}
        assert found.get(knob.name, value) is value


@pytest.mark.parametrize(
    ("name", "value", "release", "arguments"),
    [
        ("moe_flex_dispatcher_backend", "deepep", "0.16.0", ("--moe-flex-dispatcher-backend", "deepep")),
        ("moe_flex_dispatcher_backend", "deepep", "0.14.0", ("--moe-enable-deepep",)),
        ("moe_flex_dispatcher_backend", "hybridep", "0.14.0", ()),
        ("cuda_graph_impl", "local", "0.16.0", ("--cuda-graph-impl", "local")),
        ("cuda_graph_impl", "local", "0.12.0", ("--enable-cuda-graph",)),
        ("cuda_graph_impl", "transformer_engine", "0.15.0+flagscale", ("--external-cuda-graph",)),
        ("cuda_graph_scope", "attn", "0.18.0", ("--cuda-graph-modules", "attn")),
        ("use_megatron_fsdp", True, "0.13.0", ("--use-custom-fsdp",)),
        ("overlap_p2p_comm", True, None, ()),
        ("overlap_p2p_comm", False, None, ("--no-overlap-p2p-communication",)),
        ("accumulate_allreduce_grads_in_fp32", False, "0.12.0", ("--grad-reduce-in-bf16",)),
    ],
)
def test_a_value_has_the_spelling_of_its_release(
    name: str, value: str | bool, release: str | None, arguments: tuple[str, ...]
) -> None:
    assert BY_NAME[name].arguments(value, release) == arguments


def problems(release: str | None, settings: dict[str, SettingValue], **sections: Any) -> list[tuple[str, object]]:
    try:
        ENGINE.check_values(replace(tasks.task(engine_version=release, settings=settings).spec, **sections))
    except SpecErrors as errors:
        return [(each.key, each.value) for each in errors.problems]
    return []


def test_a_setting_that_the_release_lacks_is_an_error() -> None:
    expected: dict[str, SettingValue] = {
        "overlap_grad_reduce": True,
        "pipeline_model_parallel_layout": "Et|tL",
        "exp_avg_dtype": "bf16",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_expert_imbalance": 1.5,
    }
    incomplete = ["pipeline_model_parallel_layout", "exp_avg_dtype", "moe_flex_dispatcher_backend"]
    assert problems("0.12.1", expected) == [(f"train.settings.{name}", expected[name]) for name in incomplete]
    assert problems("0.16.1", expected) == []
    assert problems(None, expected) == []


def test_the_fix_names_available_releases_or_values() -> None:
    for name, value, fix in (("cuda_graph_scope", "attn,mlp", "full"), ("delay_wgrad_compute", True, "0.13.0")):
        spec = tasks.task(engine_version="0.12.0", settings={name: value}).spec
        with pytest.raises(SpecErrors) as caught:
            ENGINE.check_values(spec)
        assert fix in caught.value.fix


def test_values_of_space_and_baseline_are_checked_too() -> None:
    baseline, space = {"use_megatron_fsdp": True}, {"delay_wgrad_compute": (False, True), "micro_batch_size": "auto"}
    found = problems("0.11.0", {}, baseline=baseline, space=space)
    assert found == [("auto_tuner.baseline.use_megatron_fsdp", True), ("auto_tuner.space.delay_wgrad_compute", True)]


def test_flags_that_a_setting_needs_are_passed_with_it() -> None:
    settings: dict[str, SettingValue] = {"moe_token_dispatcher_type": "flex", "use_megatron_fsdp": True}
    spec = tasks.task(engine_version="0.14.0", settings=settings).spec
    words = flags({}, spec, None)
    assert release_table("0.14.0").parse(words)[1] == []
    found = release_table("0.14.0").effective(words)
    assert (found["moe_enable_deepep"], found["data_parallel_sharding_strategy"]) == (True, "optim_grads_params")
    own = replace(spec.train, command=("pretrain_gpt.py", "--moe-enable-deepep"))
    assert "--moe-enable-deepep" not in flags({}, replace(spec, work=own), None)
