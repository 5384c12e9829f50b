"""What the plugin ships as data: variables, quirks, and how mature each part is."""

import re
from pathlib import Path

import pytest
from flagcore_cambricon import hooks

from flagcore.vendorkit.maturity import maturity
from flagcore.vendorkit.parts import SOURCE_SAYS
from flagcore.vendorkit.quirks import quirks
from flagcore.vendorkit.variables import environment, variables

PACKAGE = "flagcore_cambricon"
FOLDER = Path(hooks.__file__).parent
CHIPS = {chip.name: chip for chip in hooks.flagcore_chips()}
ENGINES = {"megatron", "vllm", "sglang", "llamacpp"}


def test_each_variable_says_what_it_means_and_where_that_is_from() -> None:
    assert variables(PACKAGE)
    for each in variables(PACKAGE):
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", each.name)
        assert each.meaning
        assert each.source.kind in SOURCE_SAYS
        assert set(each.engines) <= ENGINES
        assert set(each.chips) <= set(CHIPS)


def test_trials_are_given_only_variables_with_a_value() -> None:
    given = environment(PACKAGE, CHIPS["MLU370-X8"], "megatron", {})
    assert given["GEMS_VENDOR"] == "cambricon"
    assert given["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert set(given) <= {each.name for each in variables(PACKAGE) if each.value}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment(PACKAGE, CHIPS["MLU370-X8"], "vllm", {})


def test_a_value_of_the_users_shell_is_kept_and_the_conflict_told(caplog: pytest.LogCaptureFixture) -> None:
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "GEMS_VENDOR": "cambricon"}
    assert environment(PACKAGE, CHIPS["MLU370-X8"], "megatron", own)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert ["CUDA_DEVICE_MAX_CONNECTIONS=8" in record.getMessage() for record in caplog.records] == [True]


def test_each_failure_matches_its_example_first_and_says_where_it_is_from() -> None:
    failures = quirks(PACKAGE).failures
    assert failures
    for each in failures:
        first = next(other for other in failures if re.search(other.pattern.pattern, each.example))
        assert first is each
        assert each.source.kind in SOURCE_SAYS
        assert set(each.engines) <= ENGINES


def test_refusals_and_notes_are_of_known_chips_and_engines_and_have_sources() -> None:
    for refusal in quirks(PACKAGE).refusals:
        assert refusal.engine in ENGINES
        assert set(refusal.chips) <= set(CHIPS)
        assert refusal.source.kind in SOURCE_SAYS
    for known in quirks(PACKAGE).support:
        assert known.engine in ENGINES
        assert set(known.chips) <= set(CHIPS)
        assert known.source.kind in SOURCE_SAYS
    for note in quirks(PACKAGE).notes:
        assert set(note.engines) <= ENGINES
        assert set(note.chips) <= set(CHIPS)
        assert note.source.kind in SOURCE_SAYS


def test_what_is_said_to_be_mature_is_what_the_plugin_holds() -> None:
    said = maturity(PACKAGE)
    transcripts = [name for claim in said.checked_on_transcripts for name in claim.files]
    present = {path.name for path in (Path(__file__).parent / "smi").iterdir()} - {"sources.yaml"}
    assert sorted(transcripts) == sorted(present)
    (facts,) = [claim for claim in said.from_documents if claim.what == "facts of the chips"]
    assert set(facts.chips) == set(CHIPS)
    claims = (*said.run_on_hardware, *said.checked_on_transcripts, *said.from_documents)
    assert {name for claim in claims for name in claim.chips} <= set(CHIPS)


def test_costs_that_are_said_to_be_there_are_shipped_and_no_others() -> None:
    said = maturity(PACKAGE)
    claims = (*said.run_on_hardware, *said.checked_on_transcripts, *said.from_documents)

    def named(*words: str) -> set[str]:
        return {
            name.casefold() for claim in claims if any(word in claim.what for word in words) for name in claim.chips
        }

    measured = {
        path.parent.name for path in FOLDER.glob("costs/*/collectives.yaml") if "same_as" not in path.read_text()
    }
    assert measured == named("collectives", "all-reduces")
    kernels = {path.parent.name for name in ("curve", "kernels") for path in FOLDER.glob(f"costs/*/{name}.*")}
    assert kernels == named("kernel times")


def test_what_was_run_on_hardware_has_a_table_with_its_provenance() -> None:
    run = {name.casefold() for claim in maturity(PACKAGE).run_on_hardware for name in claim.chips}
    assert run == {path.parent.name for path in FOLDER.glob("costs/*/provenance.yaml")}


def test_refused_values_are_those_of_the_engines_knobs() -> None:
    from flagcore.workloads.serving.engines import vllm_knobs

    for refusal in quirks(PACKAGE).refusals:
        assert refusal.engine == "vllm"
        assert set(refusal.refused.values) <= set(vllm_knobs.BY_NAME[refusal.refused.knob].words)
