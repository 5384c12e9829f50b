"""Names of knobs that all serving engines may have."""

from __future__ import annotations

INSTANCES = "instances"
SIZES = "instance_sizes"
"""Devices of each instance if they are not equal, such as 4+2+2. It replaces INSTANCES and TP."""
TP, PP, DP, EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
)
"""DP is attention data parallelism inside one instance, which has TP x PP x DP devices, whatever the engine's own flags
count."""
