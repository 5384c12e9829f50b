"""The checks of the kit as pytest tests. A skipped test states its reason."""

from collections.abc import Sequence

import pytest

from flagcore.domain.trial import TrialState
from flagcore_testing.checks import CHECKS
from flagcore_testing.kit import Check, Subject, run

SUBJECTS: dict[int, Subject] = {}
"""Cache of plugins under test, so that tests share the answers of a plugin."""


class PluginConformance:
    """Base class of a plugin's tests: override the fixture `plugin`. Each check of the kit is a test."""

    @pytest.fixture
    def plugin(self) -> object:
        """Override: the module (or object) that the entry point names."""
        raise NotImplementedError("override the fixture `plugin` of PluginConformance")

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        """Override to add examples to those in `quirks.yaml`: log lines with the state of the failed trial."""
        return ()

    @pytest.fixture
    def subject(self, plugin: object, failure_examples: Sequence[tuple[str, TrialState]]) -> Subject:
        """The plugin under test."""
        subject = SUBJECTS.get(id(plugin))
        if subject is None or subject.hooks is not plugin:
            subject = SUBJECTS[id(plugin)] = Subject.of(plugin, failure_examples)
        return subject

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(self, subject: Subject, check: Check) -> None:
        """Run one check, and fail with its problems and fixes."""
        result = run(check, subject)
        if result.state == "skipped":
            pytest.skip(result.message)
        assert result.state == "passed", f"{result.message}\nFix: {result.fix}"

    @pytest.mark.device
    def test_devices_that_are_here_are_of_known_chips(self, subject: Subject) -> None:
        """Fail if a device on this machine has a chip that the plugin does not list."""
        devices = subject.loaded.devices()
        if not devices:
            pytest.skip("no device of this vendor on this machine")
        for device in devices:
            assert subject.loaded.find_chip(device.chip) is not None, f"no chip has the name {device.chip!r}"
