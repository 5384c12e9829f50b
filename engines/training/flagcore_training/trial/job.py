"""The parts of a job that the trial programs of several engines share. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


class JobError(ValueError):
    """The job cannot be run. The message has one line."""


@dataclass(frozen=True)
class Train:
    """The part of a job that all candidates share: the work of one step and the number of steps.

    `balanced_routing` assigns tokens to experts evenly at random, because an untrained router prefers a few experts.
    `implementation` is `local` for megatron-core's layers, or `transformer_engine`.
    """

    seq_length: int
    global_batch_size: int
    precision: str
    train_iters: int
    seed: int
    balanced_routing: bool = False
    implementation: str = "local"


@dataclass(frozen=True)
class Device:
    """The type of device and the backend of its collectives, as torch names them.

    `preload` are the modules that register the device. They are imported in this order after torch.
    """

    type: str = "cpu"
    backend: str = "gloo"
    preload: tuple[str, ...] = ()
    threads_per_rank: int = 1
