from collections.abc import Sequence

import pytest
from flagcore_cambricon import hooks

from flagcore.domain.trial import TrialState
from flagcore.testing import PluginConformance


class TestCambricon(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        return (
            ("RuntimeError: MLU out of memory. Tried to allocate 2.00 GiB", TrialState.OUT_OF_MEMORY),
            ("Watchdog caught collective operation timeout: WorkCNCL(OpType=ALLREDUCE)", TrialState.TIMED_OUT),
        )
