"""What the tests of training programs share."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def decoder() -> Any:
    """A decoder in plain torch on `fully_shard`, whose memory torch counts. `MIXERS` are its kinds of layers."""
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    from engines.trainers.tests import counted

    return counted
