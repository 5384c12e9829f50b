"""The values of `flag plugins new`, the files of transcripts, and the toy engine."""

import subprocess
from pathlib import Path

import pytest
from flagcore_testing import fakes
from flagcore_testing.package import FOLDER, read_transcripts, saved_outputs
from flagcore_testing.scaffold import new_plugin
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.machine import TorchReport

from extras.testing.tests.faulty import imported
from flagcore.domain.launch import Exit, classify
from flagcore.domain.trial import TrialState
from tests import tasks


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
