"""Which modules selective recompute drops, from the settings."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.domain.spec import SettingValue

EXPERT_LEVELS: Mapping[str, frozenset[str]] = {
    "light": frozenset({"moe_act", "router"}),
    "medium": frozenset({"moe_act", "router", "moe_fc1", "shared_experts"}),
    "full": frozenset({"moe"}),
}
"""What recompute of experts by level drops: the small steps between the products; these, the experts' first product and
the shared experts; the whole MoE layer. `router` and `moe_fc1` are no modules of Megatron-core."""


def recompute_modules(settings: Mapping[str, SettingValue]) -> frozenset[str]:
    """Return what selective recompute drops: the modules that are given, and those of the level for experts."""
    level = str(settings.get("moe_recompute_level") or "")
    given = settings.get("recompute_modules") or ("" if level else "core_attn")
    return words(given) | EXPERT_LEVELS.get(level, frozenset())


def words(text: SettingValue) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(str(text).split(",")) if text else frozenset()
