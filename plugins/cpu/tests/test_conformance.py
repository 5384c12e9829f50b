from collections.abc import Sequence

import pytest
from flagcore_cpu import hooks
from flagcore_testing import PluginConformance

from flagcore.domain.trial import TrialState


class TestCpu(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        return (
            (
                "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8589934592 bytes",
                TrialState.OUT_OF_MEMORY,
            ),
            ("what():  std::bad_alloc", TrialState.OUT_OF_MEMORY),
            ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5512", TrialState.FAILED),
        )
