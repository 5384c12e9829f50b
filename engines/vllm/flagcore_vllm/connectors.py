"""Connectors of `kv-transfer-config` that keep copies of the cache in other tiers, and the sizes of these tiers.

Sources: vllm 0.33 `v1/kv_offload/{cpu,tiering}/spec.py` and `distributed/kv_transfer/kv_connector/v1/*` (bytes over the
ranks of an attention DP rank); LMCache/LMCache `lmcache/v1/config.py` @000620e3 (GB of each rank, and its defaults);
docs.nvidia.com/dynamo, KVBM guide (write-through). The stores behind a network are assumed to have room for all tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from flagcore_serving.job import EngineArg
from flagcore_serving.space.settings import TIERS

from flagcore.errors import SpecError
from flagcore_vllm import json_flags

CONFIG = "kv-transfer-config"
LMCACHE = "LMCacheConnectorV1"
OFFLOADING = {None: 0.0, "OffloadingConnector": 0.0, "SimpleCPUOffloadConnector": 8.0 * 2**30}
"""The connectors of vLLM itself, each with its default bytes. None: that of kv-offloading-size."""
KEEP_WINDOWS = (LMCACHE, "FlexKVConnectorV1", "HF3FSKVConnector")
"""Those without `SupportsHMA` (vllm 0.28 to 0.33): layers with windows then cache the whole context."""
NO_HYBRID = "disable-hybrid-kv-cache-manager"
STORE, KVBM, SEVERAL = "MooncakeStoreConnector", "DynamoConnector", "MultiConnector"
GB = 2.0**30
"""LMCache's GB (`lmcache/v1/storage_backend`: 1024**3)."""


def check(value: EngineArg) -> None:
    """Raise SpecError if the value of `kv-transfer-config` is no JSON object, or has a wrong size."""
    found: object = None
    with suppress(ValueError):
        found = json.loads(str(value))
    if not isinstance(found, Mapping):
        fix = """write one such as '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'"""
        raise SpecError(key=f"serve.engine_args.{CONFIG}", value=value, problem="must be a JSON object", fix=fix)
    for each in connectors({CONFIG: str(value)}):
        json_flags.check({f"{CONFIG}.{name}": of_name for name, of_name in each.items()})
        if not isinstance(each.get("kv_connector"), str | None):
            problem, fix = "must be a name", "write one, such as OffloadingConnector"
            raise SpecError(key=f"{CONFIG}.kv_connector", value=each["kv_connector"], problem=problem, fix=fix)
        for name in ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"):
            _number(_extra(each).get(name), f"{CONFIG}.kv_connector_extra_config.{name}")


def connectors(args: Mapping[str, EngineArg]) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration of each connector in `args`, also of those in a MultiConnector."""
    value, keys = args.get(CONFIG), {key: each for key, each in args.items() if key.startswith(f"{CONFIG}.")}
    found: object = {key.removeprefix(f"{CONFIG}."): each for key, each in keys.items()} or value
    with suppress(ValueError):
        found = json.loads(value) if isinstance(value, str) and not keys else found
    queue = [found]
    while queue:
        each = queue.pop(0)
        if isinstance(each, Mapping):
            parts = _extra(each).get("connectors")
            queue += parts if each.get("kv_connector") == SEVERAL and isinstance(parts, list) else []
            yield each


def without_hybrid(args: Mapping[str, EngineArg]) -> str:
    """Return which of `args` turns vLLM's hybrid cache manager off: a connector, the flag, or an empty text."""
    names = [str(each.get("kv_connector")) for each in connectors(args)]
    return next((name for name in names if name in KEEP_WINDOWS), NO_HYBRID if args.get(NO_HYBRID) else "")


def _extra(connector: Mapping[str, Any]) -> Mapping[str, Any]:
    found = connector.get("kv_connector_extra_config")
    return found if isinstance(found, Mapping) else {}


def tier_bytes(args: Mapping[str, EngineArg], envs: Mapping[str, str], ranks: float) -> dict[str, float]:
    """Return the bytes of each of TIERS for an attention DP rank with `ranks` devices. Raises SpecError."""
    total = dict.fromkeys(TIERS, 0.0)

    def of_variable(name: str, default: float = 0.0) -> float:
        return _number(envs.get(name), f"envs.{name}", default)

    for each in connectors(args):
        name, extra = each.get("kv_connector"), _extra(each)
        if name in OFFLOADING:
            per_rank = ranks * _number(extra.get("cpu_bytes_to_use_per_rank"), CONFIG)
            total["host"] += per_rank or _number(extra.get("cpu_bytes_to_use"), CONFIG, OFFLOADING[name])
        elif name == LMCACHE:
            if envs.get("LMCACHE_LOCAL_CPU", "true").lower() in ("true", "1"):
                total["host"] += ranks * GB * of_variable("LMCACHE_MAX_LOCAL_CPU_SIZE", 5.0)
            if envs.get("LMCACHE_LOCAL_DISK"):
                total["disk"] += ranks * GB * of_variable("LMCACHE_MAX_LOCAL_DISK_SIZE")
            total["store"] += math.inf if envs.get("LMCACHE_REMOTE_URL") else 0.0
        elif name == KVBM:
            for tier, variable in (("host", "DYN_KVBM_CPU_CACHE_GB"), ("disk", "DYN_KVBM_DISK_CACHE_GB")):
                total[tier] += GB * of_variable(variable)
        elif name == STORE:
            total["store"] = math.inf
    return total


def _number(value: object, key: str, default: float = 0.0) -> float:
    """Return a size, or `default` without one. Raises SpecError."""
    number = math.nan
    with suppress(TypeError, ValueError):
        number = default if value is None else float(value)  # type: ignore[arg-type]
    if not 0.0 <= number < math.inf:
        raise SpecError(key=key, value=value, problem="is not a size", fix="write a number of at least 0")
    return number
