"""The serving workloads that ship with flagcore, one an engine."""

from __future__ import annotations

from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.llamacpp.profile import ENGINE as LLAMACPP_PROFILE
from flagcore.engines.serving.sglang.profile import ENGINE as SGLANG_PROFILE
from flagcore.engines.serving.vllm.profile import ENGINE as VLLM_PROFILE

LLAMACPP = Serving(LLAMACPP_PROFILE, "flagcore.engines.serving.llamacpp.profile:ENGINE")
VLLM = Serving(VLLM_PROFILE, "flagcore.engines.serving.vllm.profile:ENGINE")
SGLANG = Serving(SGLANG_PROFILE, "flagcore.engines.serving.sglang.profile:ENGINE")
