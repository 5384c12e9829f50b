"""Each check is run on a plugin with a fault that it must find. `flag plugins new`, transcripts and the toy engine."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing import fakes
from flagcore_testing.checks import CHECKS, chips, module, telemetry
from flagcore_testing.checks.costs import corrections_are_of_measured_kernels
from flagcore_testing.checks.engines import entries_apply_somewhere
from flagcore_testing.checks.packaging import project_is_built_and_named as is_named
from flagcore_testing.checks.telemetry import telemetry_is_of_the_right_field
from flagcore_testing.kit import run
from flagcore_testing.package import FOLDER, read_transcripts, saved_outputs
from flagcore_testing.places import place_of
from flagcore_testing.scaffold import new_plugin
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.machine import TorchReport

from extras.testing.tests.faults import FAULTS
from extras.testing.tests.faulty import CHIP, ENVIRONMENT, PYPROJECT, Fault, broken, edit, healthy, imported
from flagcore.domain.chip import Device
from flagcore.domain.launch import Exit, classify
from flagcore.domain.trial import TrialState
from tests import tasks

pytestmark = pytest.mark.spread


WITHOUT_FAULT = {
    "corrections_are_of_measured_kernels",
    "links_of_one_name_agree",
    "larger_micro_batches_need_more_memory",
    "log_examples_match",
    "no_placeholders_are_left",
    "telemetry_is_of_the_right_field",
}
"""Checks that only skip, or that no single edit breaks."""


WITHOUT_LINE = {
    "metadata_is_complete",
    "chip_names_are_clean",
    "commands_ask_for_the_format",
    "import_has_no_side_effects",
    "import_loads_no_framework",
    "hooks_return_quickly",
    "hooks_write_no_files",
    "shipped_costs_belong_to_chips",
    "plugin_loads",
}
"""Checks whose problem may be a missing file, or the module as a whole."""


AGAIN = {
    "figures_agree_with_their_second_entry",
    "parsers_are_tried_on_transcripts",
    "readings_are_found_in_transcripts",
    "settings_agree_with_their_second_entry",
    "telemetry_is_what_a_person_reads",
}
"""Checks that fail with most others: what they compare with was entered a second time, or is in the transcripts."""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 3.0)
    monkeypatch.setattr(module, "IMPORT_SECONDS", 2.0)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy(tmp_path_factory.mktemp("healthy"))


@pytest.mark.slow
@pytest.mark.costly
def test_a_valid_plugin_passes_all_checks(acme: Path) -> None:
    with imported(acme) as plugin:
        results = [run(check, plugin) for check in CHECKS]
    assert [result for result in results if result.state == "failed"] == []
    assert {result.check for result in results if result.state == "skipped"} == {
        "devices_are_selected_by_an_own_variable",
        "log_examples_match",
        "no_placeholders_are_left",
        "topology_command_is_known",
        "uuids_are_read",
    }


def by_time(faults: Sequence[Fault]) -> Iterator[Any]:
    """Yield the faults. A check that starts processes takes a second: all its faults but the first are long."""
    seen: set[str] = set()
    for fault in faults:
        starts_processes = fault.check.startswith(("import_", "hooks_"))
        mark = pytest.mark.long if fault.check in seen else pytest.mark.slow
        yield pytest.param(fault, id=fault.check, marks=mark if starts_processes else ())
        seen.add(fault.check)


@pytest.mark.costly
@pytest.mark.parametrize("fault", [*by_time(FAULTS)])
def test_a_fault_fails_its_check(tmp_path: Path, acme: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (check,) = (each for each in CHECKS if each.__name__ == fault.check)
    with imported(broken(tmp_path, acme, fault)) as plugin:
        result = run(check, plugin)
    assert result.state == "failed"
    assert fault.names in result.message
    assert result.fix
    assert ".py:" in result.message or ":" in result.places or fault.check in WITHOUT_LINE


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.check)
def test_a_fault_fails_only_its_check(
    tmp_path: Path, acme: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with imported(broken(tmp_path, acme, fault)) as plugin:
        results = [run(check, plugin) for check in CHECKS]
    failed_checks = {result.check for result in results if result.state == "failed"} - (AGAIN - {fault.check})
    assert fault.check in failed_checks
    if "*" not in fault.also:
        assert failed_checks == {fault.check, *fault.also}


def test_valid_variants_pass(tmp_path: Path, acme: Path) -> None:
    limit = "  - {name: ACME_LIMIT, value: '1', versions: '>=2.1.0.3,<2.1.0.5', meaning: a limit, source: *made_up}\n"
    folder = broken(tmp_path, acme, Fault("", ENVIRONMENT, "", limit, ""))
    edit(folder / CHIP, "devices_per_node: 8", "devices_per_node: 8\narchitecture: Acme910B3")
    for name in (PYPROJECT, "README.md"):
        file = folder / name
        file.write_text(file.read_text("utf-8").replace("flagcore-acme", "flagcore-acme-npu"), "utf-8")
    with imported(folder) as plugin:
        results = [run(check, plugin) for check in (entries_apply_somewhere, chips.architectures_are_alike, is_named)]
    assert {result.state for result in results} == {"passed"}


def test_corrections_are_of_kernels_that_were_measured(tmp_path: Path, acme: Path) -> None:
    fault = Fault("", "flagcore_acme/costs/a1/kernels.jsonl", "", '{"kernel": "launch", "us": 7}\n', "")
    folder = broken(tmp_path, acme, fault)
    provenance = "how: by hand\nsoftware: {driver: '1'}\ndate: 2026-11-02\nhost_us: {gem: 20}\n"
    (folder / "flagcore_acme/costs/a1/provenance.yaml").write_text(provenance)
    with imported(folder) as plugin:
        result = run(corrections_are_of_measured_kernels, plugin)
    assert result.state == "failed"
    assert "host_us has gem" in result.message


def test_a_problem_of_a_chip_is_in_its_document_of_the_file_of_a_series(tmp_path: Path, acme: Path) -> None:
    size = "memory_bytes: {value: 80, source: {kind: estimated, method: guess}}"
    second = f"---\nchip: A1-Lite\nvendor: acme\n{size}\n"
    folder = broken(tmp_path, acme, Fault("", CHIP, "", second, ""))
    lines = (folder / CHIP).read_text().splitlines()
    with imported(folder) as plugin:
        assert run(chips.chip_files_match_chip_names, plugin).state == "passed"
        result = run(chips.figures_are_plausible, plugin)
    assert "A1-Lite: memory_bytes = 80" in result.message
    place = f"{CHIP}:{lines.index(size) + 1}"
    assert place in result.places
    assert place_of("A1-Lite and A1: memory_bytes", [folder / "flagcore_acme"]) == place  # that of the first


def test_links_of_one_name_agree(tmp_path: Path, acme: Path) -> None:
    folder = broken(tmp_path, acme, Fault("", "flagcore_acme/chips/b1.yaml", "", " ", ""))
    chip = (folder / "flagcore_acme/chips/a1.yaml").read_text().replace('"A1"', "%s").replace('["ACME A1"]', "[]")
    (folder / "flagcore_acme/chips/b1.yaml").write_text(chip.replace("%s", "B1"))
    (folder / "flagcore_acme/chips/b2.yaml").write_text(chip.replace("%s", "B2").replace("2.0e+11", "4.0e+11"))
    with imported(folder) as plugin:
        result = run(chips.links_of_one_name_agree, plugin)
    assert result.state == "failed"
    assert "B2: link.bytes_per_second = 4e+11" in result.message


def test_the_temperature_of_the_memory_is_not_that_of_the_device(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"Temperature (Sensor junction) (C)": "36.0", "Temperature (Sensor memory) (C)": "31.0"}'
    with imported(acme) as plugin:
        for celsius, state in ((36.0, "passed"), (31.0, "failed")):
            samples = [(Device(index=0, chip="A1"), {"temperature_celsius": celsius}, text)]
            monkeypatch.setattr(telemetry, "_samples", lambda plugin, samples=samples: samples)
            assert run(telemetry_is_of_the_right_field, plugin).state == state


def test_every_check_has_a_fault() -> None:
    assert {check.__name__ for check in CHECKS} == {fault.check for fault in FAULTS} | WITHOUT_FAULT
    assert len(CHECKS) == 136, "a check was added, or a file of the kit lost one"


@pytest.mark.parametrize(
    ("device", "trusted"), [("cuda", {"version": "2.10.0+acme"}), ("tpx", {"attributes": {"tpx"}})]
)
def test_a_new_plugin_has_the_given_values(tmp_path: Path, device: str, trusted: dict[str, object]) -> None:
    folder = new_plugin(
        "acme",
        chips=("A1", "777"),
        tool="ac-gmi info",
        visible="AC_RT_VISIBLE",
        torch_device=device,
        backend="accl",
        preload=("torch_tpx",),
        directory=str(tmp_path),
    )
    report: dict[str, object] = {"version": "2.10.0", "attributes": frozenset(), "devices": ()}
    table = (folder / "tests/smi/ac-gmi-1.txt").read_text()
    with imported(folder) as plugin:
        assert {chip.name for chip in plugin.chips} == {"A1", "777"}
        for kind in ("megatron", "vllm"):
            support = plugin.loaded.engine_support(plugin.chips[0], kind)
            assert (support.device_type, support.distributed_backend) == (device, "accl")
            assert (support.visible_devices, support.preload) == (("AC_RT_VISIBLE",), ("torch_tpx",))
        detector = plugin.hooks.detector  # type: ignore[attr-defined]
        assert (detector.tool, detector.torch_device) == ("ac-gmi", device)
        assert not detector.trusts(TorchReport(**report))  # type: ignore[arg-type]
        assert detector.trusts(TorchReport(**{**report, **trusted}))  # type: ignore[arg-type]
        tools = {"ac-gmi": f'[ "$1" = info ] || exit 1\n{fakes.prints(table)}'}
        assert [each.chip for each in fakes.devices(plugin, tools, AC_RT_VISIBLE="1")] == ["Acme A1"]


def test_the_sources_of_transcripts_may_be_one_of_the_texts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    text = "==> sources.yaml <==\na-1.txt: {source: a lab, tool: a}\n\n==> a-1.txt <==\nA1\n"
    (tmp_path / FOLDER / "outputs.txt").write_text(text)
    (transcript,) = read_transcripts(tmp_path)
    assert (transcript.name, transcript.text, transcript.tool) == ("a-1.txt", "A1\n", "a")
    assert saved_outputs(tmp_path / FOLDER) == {"a-1.txt": "A1\n"}


@pytest.mark.parametrize(
    ("does", "where", "state"),
    [
        ("crash", "1x1", TrialState.FAILED),
        ("invalid", "", TrialState.INVALID),
        ("oom", "", TrialState.OUT_OF_MEMORY),
        ("crash", "2x1", None),
    ],
)
def test_a_trial_fails_as_its_settings_say(does: str, where: str, state: TrialState | None, tmp_path: Path) -> None:
    task, candidate = tasks.task(settings={"does": does, "where": where}), tasks.candidate(data_parallel_size=4)
    launch = ENGINE.launch(tasks.platform(task), candidate, str(tmp_path))
    done = subprocess.run(launch.argv, capture_output=True, timeout=60)
    if state is None:
        measured = ENGINE.read(task, candidate, str(tmp_path))
        assert (len(measured.step_times_s), measured.effective["global_batch_size"]) == (4, 8)
    else:
        end = Exit(code=done.returncode, ended_by=None, duration_s=1.0)
        assert classify(end, done.stderr.decode(), ENGINE.failures)[0] is state
