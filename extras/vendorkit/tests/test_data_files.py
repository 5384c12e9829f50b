"""The data files of a plugin, and what is reported of mistakes in them.

Classes of settings: what is named, how wide its interval is, and settings of models and of common software.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.calibration.overlay import ExtendedPlugins
from flagcore_vendorkit.chip_file import load_chips, read_chip
from flagcore_vendorkit.engines import Variable, all_knobs, read_engines, read_maturity, read_quirks, read_variables
from flagcore_vendorkit.fields import Scope
from flagcore_vendorkit.settings import UNKNOWN_TIME, Cost, Settings

from flagcore.domain.chip import Chip, Source
from flagcore.domain.engine import UNKNOWN, TaskAdvice, Unmodelled
from flagcore.domain.knob import in_versions
from flagcore.domain.model import Layer, Model
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.tuner.stages.complete import unmodelled
from tests import tasks
from tests.checks import refuses
from tests.tasks import VISION, Service, task

READERS: dict[str, Any] = {
    "engines": read_engines,
    "environment": read_variables,
    "knobs": all_knobs,
    "maturity": read_maturity,
    "quirks": read_quirks,
}
SOURCE = "source: {kind: published, where: a manual}"
KNOB = f"name: a, engine: e, says: s, {SOURCE}"
Read = Callable[[str, str], object]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read a file of some text in a package that has no other."""

    def error_of_file(file: str, text: str) -> object:
        package = "data_of_acme"
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / f"{file}.yaml").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, package, raising=False)
        READERS[file].cache_clear()
        found: object = READERS[file](package)
        return found

    return error_of_file


@pytest.mark.parametrize(
    ("file", "text", "keys"),
    [
        ("knobs", "knobs: 5", ["knobs"]),
        ("knobs", "knobs: [5]", ["knobs[0]"]),
        ("knobs", f"knobs: [{{{KNOB}, choices: [{{value: 1, time: 5}}]}}]", ["knobs[0].choices[0].time"]),
        ("knobs", f"knobs: [{{{KNOB}, minimum: 3, choices: []}}]", ["knobs[0].minimum"]),
        (
            "knobs",
            f"knobs: [{{{KNOB}, choices: [{{value: 1, memory: {{value: 0.9, low: 1.0, high: 1.1}}}}]}}]",
            ["knobs[0].choices[0].memory"],
        ),
        ("quirks", f"refused: [{{name: a, knob: b, reason: c, {SOURCE}}}]", ["refused[0]"]),
        ("quirks", f"failures: [{{pattern: a, state: asleep, example: c, {SOURCE}}}]", ["failures[0].state"]),
        ("quirks", f"notes: [{{note: a, kinds: [x], {SOURCE}}}]", ["notes[0].kinds[0]"]),
        ("quirks", f"notes: [{{note: a, versions: x, {SOURCE}}}]", ["notes[0].versions"]),
        ("quirks", f"notes: [{{note: 1, colour: red, {SOURCE}}}]", ["notes[0].note", "notes[0].colour"]),
        ("quirks", "notes: [{note: a}]", ["notes[0].source"]),
        ("quirks", "notes: [{note: a, source: hello}]", ["notes[0].source"]),
        ("quirks", "2026-11-02: a", ["2026-11-02"]),
        ("quirks", "a: &a [*a]", ["a" + 32 * "[0]"]),
        ("environment", f"variables: [{{name: A, meaning: m, value: 1, {SOURCE}}}]", ["variables[0].value"]),
        ("environment", f"variables: [{{name: A, meaning: m, {SOURCE}}}]", ["variables[0]"]),
        ("engines", "train: {works: maybe, device_type: x}", ["train.works"]),
        ("engines", "train: 3", ["train"]),
        ("engines", "trains: {device_type: x}", ["trains"]),
        ("maturity", "run_on_hardware: [{what: a, chips: [b], software: c}]", ["run_on_hardware[0].date"]),
        ("maturity", "from_documents: [{what: a}]\ncolour: red", ["from_documents[0].chips", "colour"]),
    ],
)
def test_an_error_is_reported_with_its_key(read: Read, file: str, text: str, keys: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        read(file, text)
    assert [each.key for each in caught.value.problems] == keys
    assert caught.value.file.endswith(f"/{file}.yaml")


GOOD = """
chip: X1
vendor: x
aliases: [Example X1]
memory_bytes: {value: 85899345920, source: {kind: measured, how: driver query, software: driver 12.4, repeats: 3}}
dense_flops_per_second:
  bf16: {value: 3.0e+14, source: {kind: datasheet, document: X1 brief, page: 3}}
link:
  name: XLink
  topology: switch
  bytes_per_second: {value: 1.0e+11, source: {kind: estimated, method: half of both directions}}
"""


def test_every_figure_keeps_its_source() -> None:
    chip = read_chip(GOOD, "x1.yaml")
    assert chip.memory_bytes is not None
    assert chip.memory_bytes.value == 80 * 2**30
    assert chip.memory_bytes.source.detail == "driver query, software driver 12.4, repeats 3"
    assert chip.dense_flops_per_second["bf16"].source.kind == "datasheet"
    assert chip.link is not None
    assert chip.link.bytes_per_second.value == 1e11
    assert chip.nic_bytes_per_second is None


def chips_of(folder: Path, monkeypatch: pytest.MonkeyPatch, second: str) -> tuple[Chip, ...]:
    """Return the chips of a package with X1 and another chip, of which `second` is the last line."""
    (folder / "chips_of_acme" / "chips").mkdir(parents=True)
    (folder / "chips_of_acme" / "__init__.py").touch()
    (folder / "chips_of_acme" / "chips" / "not-a-chip.txt").touch()
    (folder / "chips_of_acme" / "chips" / "x1.yaml").write_text(GOOD)
    (folder / "chips_of_acme" / "chips" / "x2.yaml").write_text(f"chip: X2\nvendor: acme\n{second}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "chips_of_acme", raising=False)
    load_chips.cache_clear()
    return load_chips("chips_of_acme")


def test_a_chip_has_the_value_and_the_source_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = chips_of(tmp_path, monkeypatch, "memory_bytes: {same_as: X1}")
    assert first.memory_bytes == second.memory_bytes is not None
    assert second.memory_bandwidth_bytes_per_second is None


def test_a_name_selects_the_chips_that_may_have_it_whatever_else_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips_of(tmp_path, monkeypatch, 'aliases: ["Acme x-2_b+"]\nmemory_bytes: {same_as: X1}')
    (tmp_path / "chips_of_acme" / "chips" / "x3.yaml").write_text("chip: X3\nvendor: [\n")
    load_chips.cache_clear()
    for name, found in (("x1", ["X1", "X2"]), ("x2b+", ["X2"]), ("acmex2b", ["X2"]), ("x9", [])):
        assert [chip.name for chip in load_chips("chips_of_acme", name)] == found
    assert load_chips("chips_of_acme", "x2b")[0].memory_bytes == load_chips("chips_of_acme", "x1")[0].memory_bytes
    with pytest.raises(SpecError):
        load_chips("chips_of_acme", "x3")


def test_a_file_of_a_series_has_a_document_for_each_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = "---\nchip: X2-Lite\nvendor: acme\nmemory_bytes: {same_as: X1}\n"
    first, second, third = chips_of(tmp_path, monkeypatch, series)
    assert ([second.name, third.name], third.memory_bytes) == (["X2", "X2-Lite"], first.memory_bytes)
    first_is_wrong = f"chip: X2\nchip: X3\n{series}"
    second_is_wrong = f"chip: X2\nvendor: acme\n{series.replace('X2-Lite', repr('X2-Lite'))}chip: X3\n"
    for text, name, line in ((first_is_wrong, "x2.yaml", 2), (second_is_wrong, "x2.yaml (X2-Lite)", 7)):
        (tmp_path / "chips_of_acme" / "chips" / "x2.yaml").write_text(text)
        load_chips.cache_clear()
        with pytest.raises(SpecError) as caught:
            load_chips("chips_of_acme")
        assert (caught.value.file, caught.value.key) == (f"chips_of_acme/chips/{name}", f"line {line}, column 1")


@pytest.mark.parametrize("name", ["X9", "X2"])
def test_a_value_of_no_chip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with refuses("memory_bytes.same_as"):
        chips_of(tmp_path, monkeypatch, f"memory_bytes: {{same_as: {name}}}")


@pytest.mark.parametrize(
    ("old", "new", "key", "fix"),
    [
        ("3.0e+14", "-1", "dense_flops_per_second.bf16.value", ""),
        ("kind: datasheet", "kind: rumour", "dense_flops_per_second.bf16.source.kind", "measured"),
        ("document: X1 brief, ", "", "dense_flops_per_second.bf16.source.document", "document"),
        (", source: {kind: datasheet, document: X1 brief, page: 3}", "", "dense_flops_per_second.bf16.source", ""),
        ("  bf16:", "  bf61:", "dense_flops_per_second.bf61", "bf16"),
        (
            "X1 brief, page",
            "X1 brief, revision 3, page",
            "dense_flops_per_second.bf16.source.'revision 3'",
            'document: "X1 brief, revision 3"',
        ),
        ("vendor: x", "", "vendor", ""),
        ("vendor: x", "vendor: x\ncolour: red", "colour", ""),
        ("topology: switch", "topology: star", "link.topology", "switch"),
        ("[Example X1]", "[1]", "aliases[0]", ""),
        ("chip: X1", "chip: [", "line 4, column 8", ""),
        (GOOD, "- a list", "the file", ""),
        ("vendor: x", "vendor: x\ndevices_per_node: 0", "devices_per_node", ""),
    ],
)
def test_an_invalid_file_is_reported_with_key_and_fix(old: str, new: str, key: str, fix: str) -> None:
    with refuses(key) as caught:
        read_chip(GOOD.replace(old, new), "x1.yaml")
    assert caught.value.file == "x1.yaml"
    assert fix in caught.value.fix


VARIABLE = Variable(name="X", value="1", meaning="?", source=Source(kind="published", detail="?"))


def test_multi_node_variables_are_not_set_on_one_node() -> None:
    one = tasks.task()
    two = replace(one, cluster=replace(one.cluster, groups=(replace(one.cluster.groups[0], nodes=2),)))
    several = replace(VARIABLE, several_nodes=True)
    assert [several.applies_to(task) for task in (None, one, two)] == [False, False, True]


def test_a_variable_is_left_out_with_a_conflicting_setting() -> None:
    limited = replace(VARIABLE, unless="use_megatron_fsdp")
    assert limited.applies_to(tasks.task())
    assert not limited.applies_to(tasks.task(settings={"use_megatron_fsdp": True}))


@pytest.mark.parametrize(
    ("versions", "release", "holds"),
    [("", "0.1", True), (">=0.11,<0.13", "0.12.0+corex", True), (">=0.11,<0.13", "0.13", False), ("<1", None, True)],
)
def test_a_release_range_matches_a_release_inside_it_or_unknown(
    versions: str, release: str | None, holds: bool
) -> None:
    assert in_versions(versions, release) == holds


@pytest.mark.parametrize(("release", "applies"), [("0.11.2", True), ("0.12.0", False), (None, False), ("0.2x", False)])
def test_a_fault_of_old_releases_does_not_apply_to_an_unknown_one(release: str | None, *, applies: bool) -> None:
    assert Scope(versions="<0.12").includes(tasks.CHIP, "vllm", release) == applies


SLOWER = Cost(why="slower", time=(1.0, 1.5), source="a page")
CLASSES = Settings(
    prefixes="TOY_",
    modelled="depth",
    harmless="port log-* TOY_LOG* cache.quiet",
    costs={
        "adapters": SLOWER,
        "no-graphs": SLOWER,
        "cache": SLOWER,
        "lists names": Cost(why="faster", time=(0.9, 1.0), unless=("two", "1e9")),
        "lists.four": SLOWER,
        "limit=32 share=0.5 switch=true": SLOWER,
        "TOY_RAW": Cost(why="other kernels", unless=("1",)),
    },
)


@pytest.mark.parametrize(
    ("name", "value", "time"),
    [
        ("depth", 3, None),
        ("port", 8000, None),
        ("log-level", "info", None),
        ("log_level", "info", None),
        ("adapters", True, (1.0, 1.5)),
        ("adapters", False, None),
        ("adapters", "0", None),
        ("adapters", None, None),
        ("adapters.rank", 16, (1.0, 1.5)),
        ("cache.size", 4, (1.0, 1.5)),
        ("cache.quiet", True, None),
        ("graphs", False, (1.0, 1.5)),
        ("no-graphs", True, (1.0, 1.5)),
        ("no-adapters", True, None),
        ("no-log-level", True, None),
        ("lists", "two", None),
        ("lists", "three", (0.9, 1.0)),
        ("lists", "Four", (1.0, 1.5)),
        ("names", "three", (0.9, 1.0)),
        ("names", 1_000_000_000, None),
        ("limit", 32, None),
        ("limit", 0, (1.0, 1.5)),
        ("limit", "0.5", (1.0, 1.5)),
        ("share", "0.50", None),
        ("share", "auto", None),
        ("switch", "1", None),
        ("switch", "off", (1.0, 1.5)),
        ("no-strange", True, UNKNOWN_TIME),
        ("strange", 1, UNKNOWN_TIME),
    ],
)
def test_a_setting_that_predictions_leave_out_is_named_with_its_interval(
    name: str, value: object, time: tuple[float, float] | None
) -> None:
    found = CLASSES.unmodelled(name, value)
    assert (found and found.time) == time


def test_the_source_of_an_effect_and_the_words_of_the_user_are_named() -> None:
    found = CLASSES.unmodelled("adapters", True, "--adapters")
    assert found is not None
    assert "--adapters" in str(found)
    assert "slower (a page)" in str(found)
    assert str(CLASSES.unmodelled("adaptors")).endswith("did you mean adapters?")


def test_variables_of_other_software_have_no_effect() -> None:
    job = replace(task().spec, envs={"TOY_RAW": "0", "TOY_LOG_LEVEL": "info", "TOY_NEW": "x", "HOME": "/root"})
    assert [each.name for each in CLASSES.of_environment(job)] == ["TOY_RAW", "TOY_NEW"]
    assert not [*CLASSES.of_environment(replace(job, envs={"TOY_RAW": "1"}))]


def test_a_default_elsewhere_is_named_if_predictions_assume_another_value() -> None:
    job = replace(task().spec, envs={"TOY_RAW": "1"})
    for usual, named in (({}, []), ({"TOY_RAW": "1"}, []), ({"TOY_RAW": "2"}, ["TOY_RAW"])):
        assert [each.name for each in CLASSES.of_environment(job, usual)] == named
        assert [*CLASSES.harmless_in(job, usual)] == ([] if named else ["TOY_RAW"])


def test_names_without_a_class_are_listed() -> None:
    assert CLASSES.unclassed(["depth", "cache.size", "no-adapters", "log-file", "strange"]) == ["strange"]


@pytest.mark.parametrize("time", [(1.1, 1.5), (0.5, 0.9), (0.0, 1.0)])
def test_the_bounds_of_a_factor_are_around_one(time: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="around 1"):
        Cost(why="slower", time=time)


def named(job: Task, **advice: Any) -> dict[str, str]:
    return {each.name: each.why for each in unmodelled(job, ENGINE, ExtendedPlugins((), print), TaskAdvice(**advice))}


def with_model(job: Task, **fields: Any) -> Task:
    model: Model = replace(job.spec.model, **fields)
    return replace(job, spec=replace(job.spec, model=model))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"unread": (("torch_dtype", "bfloat16"), ("text_config.rope_theta", "1e6"))}, []),
        ({"unread": (("n_group", "1"), ("quantization_config.quant_method", "fp8"))}, []),
        ({"unread": (("n_group", "8"), ("strange", "1"))}, ["model.n_group", "model.strange"]),
        ({"unread": (("text_config.attn_pdrop", "0.1"),)}, ["model.text_config.attn_pdrop"]),
        ({"unread": (("vision_config", "{}"),), "vision": VISION}, ["model.vision_config"]),
        ({"layers": (Layer(mixer=None, network=None),)}, []),
    ],
)
def test_keys_of_a_model_that_change_the_cost_of_training_are_named(fields: dict[str, Any], names: list[str]) -> None:
    assert sorted(named(with_model(task(), **fields))) == names


def test_a_vision_tower_that_serving_predicts_is_not_named() -> None:
    job = with_model(task(), unread=(("vision_config", "{}"),), vision=VISION)
    job = replace(job, spec=replace(job.spec, work=Service(engine="toy")))
    assert not named(job)


def test_what_an_engine_does_not_load_is_not_named() -> None:
    job = with_model(task(), unread=(("vision_config", "{}"),))
    assert not named(job, unmodelled=(Unmodelled(name="model.vision_config", why=""),))


def test_the_word_of_a_plugin_on_a_variable_decides() -> None:
    job = task()
    job = replace(job, spec=replace(job.spec, envs={"TORCH_A": "1", "TORCH_B": "1", "TRITON_DEBUG": "1", "OMP_C": "1"}))
    found = named(job, unmodelled=(Unmodelled(name="TORCH_A", why="slower"),), harmless=("TORCH_B", "TRITON_DEBUG"))
    assert found == {"TORCH_A": "slower", "OMP_C": UNKNOWN}
