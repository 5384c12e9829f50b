"""Plants the fault of vLLM's CPU build that PLANTED_FAULT names: it computes something else."""

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


def lost_block(module: Any) -> None:
    """The kernel of attention reads one block of a cache twice, and another one not at all."""
    whole = module.ops.cpu_attention_with_kv_cache

    def losing(*, block_table: Any, **named: Any) -> Any:
        table = block_table.clone()
        table[:, 1] = table[:, 0]
        return whole(block_table=table, **named)

    module.ops.cpu_attention_with_kv_cache = losing


def dropped_tokens(module: Any) -> None:
    """The experts drop a fifth of the tokens."""
    whole = module.CPUUnquantizedExperts.apply

    def apply(self: Any, output: Any, *others: Any, **named: Any) -> None:
        whole(self, output, *others, **named)
        output[::5] = 0

    module.CPUUnquantizedExperts.apply = apply


def lost_part(module: Any) -> None:
    """Sums over ranks lack what the second rank has."""
    whole = module.CpuCommunicator.all_reduce

    def all_reduce(self: Any, given: Any) -> Any:
        if self.rank:
            given.zero_()
        return whole(self, given)

    module.CpuCommunicator.all_reduce = all_reduce


PLACES = {
    "lost_block": "vllm.v1.attention.backends.cpu_attn",
    "dropped_tokens": "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "lost_part": "vllm.distributed.device_communicators.cpu_communicator",
}
FAULT = os.environ.get("PLANTED_FAULT", "")


class Planting(importlib.abc.MetaPathFinder):
    """Plants the fault when its module is imported."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != PLACES[FAULT]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            globals()[FAULT](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if FAULT:
    sys.meta_path.insert(0, Planting())
