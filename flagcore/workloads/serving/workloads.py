"""The serving workloads that ship with flagcore, one an engine."""

from __future__ import annotations

from flagcore.workloads.serving.adapter import Serving
from flagcore.workloads.serving.engines import llamacpp, sglang, vllm

LLAMACPP = Serving(llamacpp.ENGINE, "flagcore.workloads.serving.engines.llamacpp:ENGINE")
VLLM = Serving(vllm.ENGINE, "flagcore.workloads.serving.engines.vllm:ENGINE")
SGLANG = Serving(sglang.ENGINE, "flagcore.workloads.serving.engines.sglang:ENGINE")
