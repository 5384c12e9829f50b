"""Plants a fault in the trial program whose job's output folder has its name: it computes something else."""

import builtins
import sys
from typing import Any

_import = builtins.__import__


def _patch(rank: Any) -> None:
    run = rank.run_rank

    def run_rank(job: Any, *others: Any) -> None:
        FAULTS.get(job.output.name, lambda: None)()
        run(job, *others)

    rank.run_rank = run_rank


def lost_block() -> None:
    import torch
    from flagcore_megatron.trial.model import CoreAttention

    whole = CoreAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, *others: Any, **named: Any) -> Any:
        kept = torch.ones_like(value)
        kept[value.shape[0] // 4 : value.shape[0] // 2] = 0
        return whole(self, query, key, value * kept, *others, **named)

    CoreAttention.forward = forward


def dropped_tokens() -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    whole = SequentialMLP.forward

    def forward(self: Any, *others: Any) -> Any:
        output, bias = whole(self, *others)
        output = output.clone()
        output[::5] = 0
        return output, bias

    SequentialMLP.forward = forward


def lost_part() -> None:
    import torch.distributed as dist

    whole = dist.all_reduce

    def all_reduce(tensor: Any, *others: Any, **named: Any) -> Any:
        if tensor.numel() > 1000 and dist.get_rank():
            tensor.zero_()
        return whole(tensor, *others, **named)

    dist.all_reduce = all_reduce


def other_seeds() -> None:
    import torch.distributed as dist
    from flagcore_megatron.trial import model

    whole = model.set_initial_weights
    model.set_initial_weights = lambda chunk, config, seed: whole(chunk, config, seed + dist.get_rank())


def constant() -> None:
    from flagcore_training.trial import steps

    steps.LEARNING_RATE = 0.0


FAULTS = {each.__name__: each for each in (lost_block, dropped_tokens, lost_part, other_seeds, constant)}
NAME = "flagcore_megatron.trial.rank"


def _importing(name: str, *others: Any, **named: Any) -> Any:
    found = _import(name, *others, **named)
    if NAME in sys.modules and hasattr(sys.modules[NAME], "run_rank"):
        builtins.__import__ = _import
        _patch(sys.modules[NAME])
    return found


builtins.__import__ = _importing
