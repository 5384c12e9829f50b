"""Megatron: its knobs, their rules, its flags and its metrics."""

from flagcore.engines.megatron.adapter import WORKLOAD

__all__ = ["WORKLOAD"]
