"""The checks of the kit as tests of pytest. A skip gives its reason."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from flagcore.domain.trial import TrialState
from flagcore.plugins import GROUP, LoadedPlugins, PluginFailure
from flagcore.plugins.loader import installed, load_only, one_line
from flagcore_testing.checks import CHECKS
from flagcore_testing.kit import Check, Subject, run
from flagcore_testing.package import read_source
from flagcore_testing.pytest_plugin import RESULT

SUBJECTS: dict[int, Subject] = {}
"""Cache of subjects, so that tests share the answers of a plugin."""


class PluginConformance:
    """Base class of a plugin's tests: override the fixture `plugin`. Each check of the kit is a test."""

    @pytest.fixture
    def plugin(self) -> object:
        """Override: the module (or object) that the entry point names."""
        raise NotImplementedError("override the fixture `plugin` of PluginConformance")

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        """Override to add to the examples of `quirks.yaml`: log lines, with the state of the failed trial."""
        return ()

    @pytest.fixture
    def subject(self, plugin: object, failure_examples: Sequence[tuple[str, TrialState]]) -> Subject:
        """The plugin under test."""
        subject = SUBJECTS.get(id(plugin))
        if subject is None or subject.hooks is not plugin:
            subject = SUBJECTS[id(plugin)] = Subject.of(plugin, failure_examples)
        return subject

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(self, subject: Subject, check: Check, request: pytest.FixtureRequest) -> None:
        """Fail with the problem and the fix."""
        result = run(check, subject)
        request.node.user_properties.append((RESULT, asdict(result)))
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


class TestPlugin(PluginConformance):
    """The tests of `flag plugins check`, for the plugin that the options of pytest name."""

    @pytest.fixture(scope="class")
    def subject(self, pytestconfig: pytest.Config) -> Subject:
        """Import the plugin. The check that it loads reports an error of the import."""
        name, folder = pytestconfig.getoption("--flagcore-plugin"), pytestconfig.getoption("--flagcore-folder")
        try:
            return _imported(name, Path(folder) if folder else None)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            subject = Subject(name=name, hooks=None)
            failure = PluginFailure(name=name, stage="load", reason=one_line(error))
            subject.loaded = LoadedPlugins([failure])
            return subject


def _imported(name: str, folder: Path | None) -> Subject:
    if folder is None:
        points = installed(GROUP)[name]
        return Subject(name=name, hooks=load_only(points), distribution=points[0].dist)
    package = read_source(folder)
    sys.path[:0] = [str(folder), str(folder / "src")]
    module, _, attribute = package.points[name].partition(":")
    hooks = importlib.import_module(module)
    return Subject(name=name, hooks=getattr(hooks, attribute) if attribute else hooks)
