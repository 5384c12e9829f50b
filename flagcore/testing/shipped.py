"""What a plugin ships as data (variables, quirks, how mature each part is), as tests that its author subclasses."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from flagcore.domain.chip import Chip
from flagcore.vendorkit.maturity import maturity
from flagcore.vendorkit.parts import SOURCE_SAYS
from flagcore.vendorkit.quirks import quirks
from flagcore.vendorkit.variables import environment, variables
from flagcore.workloads.serving.engines import vllm_knobs

ENGINES = {"megatron", "vllm", "sglang", "llamacpp"}


class ShippedData:
    """Set `hooks`, the plugin's module of hooks, `tests`, the folder of its tests, `chip_name` and `vendor`."""

    hooks: ModuleType
    tests: Path
    chip_name: str
    vendor: str
    names_vendor = "GEMS_VENDOR"
    """The variable that names the vendor, given to trials of every engine."""
    connections = "CUDA_DEVICE_MAX_CONNECTIONS"
    """A variable that is given to trials of training alone."""

    @property
    def package(self) -> str:
        return self.hooks.__name__.partition(".")[0]

    @property
    def folder(self) -> Path:
        return Path(str(self.hooks.__file__)).parent

    @property
    def chips(self) -> set[str]:
        return {chip.name for chip in self.hooks.flagcore_chips()}

    @property
    def chip(self) -> Chip:
        found: Chip = next(chip for chip in self.hooks.flagcore_chips() if chip.name == self.chip_name)
        return found

    def test_each_variable_says_what_it_means_and_where_that_is_from(self) -> None:
        assert variables(self.package)
        for each in variables(self.package):
            assert re.fullmatch(r"[A-Z][A-Z0-9_]*", each.name)
            assert each.meaning
            assert each.source.kind in SOURCE_SAYS
            assert set(each.engines) <= ENGINES
            assert set(each.chips) <= self.chips

    def test_trials_are_given_only_variables_with_a_value(self) -> None:
        given = environment(self.package, self.chip, "megatron")
        assert given[self.names_vendor] == self.vendor
        assert given[self.connections] == "1"
        assert set(given) <= {each.name for each in variables(self.package) if each.value}
        assert self.connections not in environment(self.package, self.chip, "vllm")

    def test_each_failure_matches_its_example_first_and_says_where_it_is_from(self) -> None:
        failures = quirks(self.package).failures
        assert failures
        for each in failures:
            first = next(other for other in failures if re.search(other.pattern.pattern, each.example))
            assert first is each
            assert each.source.kind in SOURCE_SAYS
            assert set(each.engines) <= ENGINES

    def test_refusals_and_notes_are_of_known_chips_and_engines_and_have_sources(self) -> None:
        for refusal in quirks(self.package).refusals:
            assert refusal.engine in ENGINES
            assert set(refusal.chips) <= self.chips
            assert refusal.source.kind in SOURCE_SAYS
        for known in quirks(self.package).support:
            assert known.engine in ENGINES
            assert set(known.chips) <= self.chips
            assert known.source.kind in SOURCE_SAYS
        for note in quirks(self.package).notes:
            assert set(note.engines) <= ENGINES
            assert set(note.chips) <= self.chips
            assert note.source.kind in SOURCE_SAYS

    def test_what_is_said_to_be_mature_is_what_the_plugin_holds(self) -> None:
        said = maturity(self.package)
        transcripts = [name for claim in said.checked_on_transcripts for name in claim.files]
        present = {path.name for path in (self.tests / "smi").iterdir()} - {"sources.yaml"}
        assert sorted(transcripts) == sorted(present)
        (facts,) = [claim for claim in said.from_documents if claim.what == "facts of the chips"]
        assert set(facts.chips) == self.chips
        claims = (*said.run_on_hardware, *said.checked_on_transcripts, *said.from_documents)
        assert {name for claim in claims for name in claim.chips} <= self.chips

    def test_costs_that_are_said_to_be_there_are_shipped_and_no_others(self) -> None:
        said = maturity(self.package)
        claims = (*said.run_on_hardware, *said.checked_on_transcripts, *said.from_documents)

        def named(*words: str) -> set[str]:
            return {
                name.casefold() for claim in claims if any(word in claim.what for word in words) for name in claim.chips
            }

        measured = {
            path.parent.name
            for path in self.folder.glob("costs/*/collectives.yaml")
            if "same_as" not in path.read_text()
        }
        assert measured == named("collectives", "all-reduces")
        kernels = {path.parent.name for name in ("curve", "kernels") for path in self.folder.glob(f"costs/*/{name}.*")}
        assert kernels == named("kernel times")

    def test_what_was_run_on_hardware_has_a_table_with_its_provenance(self) -> None:
        run = {name.casefold() for claim in maturity(self.package).run_on_hardware for name in claim.chips}
        assert run == {path.parent.name for path in self.folder.glob("costs/*/provenance.yaml")}

    def test_refused_values_of_an_engine_that_serves_are_those_of_its_knobs(self) -> None:
        for refusal in quirks(self.package).refusals:
            if refusal.engine == "vllm" and refusal.refused.knob in vllm_knobs.BY_NAME:
                assert set(refusal.refused.values) <= set(vllm_knobs.BY_NAME[refusal.refused.knob].words)
