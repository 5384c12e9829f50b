from collections.abc import Sequence

import pytest
from flagcore_iluvatar import hooks

from flagcore.domain.trial import TrialState
from flagcore.testing import PluginConformance


class TestIluvatar(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        return (
            ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", TrialState.OUT_OF_MEMORY),
            (
                "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
                TrialState.TIMED_OUT,
            ),
        )
