"""The serving workloads that ship with flagcore, one an engine."""

from __future__ import annotations

from flagcore.contracts import Workload
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.llamacpp.profile import ENGINE as LLAMACPP_PROFILE
from flagcore.engines.serving.sglang.profile import ENGINE as SGLANG_PROFILE
from flagcore.engines.serving.vllm.profile import ENGINE as VLLM_PROFILE

LLAMACPP: Workload = Serving(LLAMACPP_PROFILE, "flagcore.engines.serving.llamacpp.profile:ENGINE")
VLLM: Workload = Serving(VLLM_PROFILE, "flagcore.engines.serving.vllm.profile:ENGINE")
SGLANG: Workload = Serving(SGLANG_PROFILE, "flagcore.engines.serving.sglang.profile:ENGINE")
