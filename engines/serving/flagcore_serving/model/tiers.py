"""A prefix cache in tiers: the memory of the devices and, behind it, that of the host, a local disk and a shared store.

All tiers evict what was not used for the longest time, and the end of a prompt before its beginning (vLLM 0.33
`v1/core/kv_cache_manager.py`, `v1/kv_offload/cpu/policies/lru.py`; SGLang 0.5.23 `mem_cache/unified_radix_cache.py`).
So one order of use determines where a token is: in the fastest tier that reaches that far back. A tier that gets a
copy of each computed token (write-through) reaches as far as its own capacity. One that gets only what the tier before
it evicts (write-back) reaches further by its capacity.

vLLM's own offload differs (`Overheads.own_order`): what the devices have is not refreshed in the host's memory, which
gets copies of computed prompts, and refreshes what it loads (vLLM 0.33 `kv_connector/v1/offloading/scheduler.py`). So
it loses first what the devices have anyway.

Copies to a slower tier are assumed to cost no time, because the host's link works in both directions.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Task
from flagcore_serving.model.memory import ServingMemory
from flagcore_serving.model.work import DISK_RATE, Serving
from flagcore_serving.space.hardware import Hardware
from flagcore_serving.space.settings import TIERS, Settings

Part = tuple[Hashable, int]
"""A part of a prompt: its identity, which includes everything before it, and its number of tokens."""

COPIES_OF_BYTE = 2.0
"""A copy within the memory of the host reads and writes each byte."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier behind the cache of a lane's devices.

    - `name`: one of TIERS.
    - `reach`: how many of the last used tokens this tier and all faster ones contain; its own tokens if each tier has
      an order of its own.
    - `token_s`: seconds to load the cache of one token.
    """

    name: str
    reach: float
    token_s: float


def tiers_of(
    task: Task, serving: Serving, settings: Settings, memory: ServingMemory, costs: Costs
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return the capacity of each tier of an instance in tokens, and its `token_s` (see `Tier`), both by candidate.

    A device loads its part over its own link to the host (of CPU cores: by a copy in their memory). The disks of a host
    are shared by its devices, and the store is reached over the network.
    """
    hardware, bandwidth = Hardware.of(task), task.cluster.groups[0].chip.memory_bandwidth_bytes_per_second
    instance_bytes = memory.token * settings.devices / settings.data
    host_s = memory.token / serving.host_rate
    if hardware.on_cores and bandwidth is not None:
        host_s = COPIES_OF_BYTE * memory.token / bandwidth.value
    hosts = np.ceil(settings.devices / hardware.per_host)
    prompt, stride = max(serving.prompt, 1.0), np.full(hosts.shape, hardware.per_host, dtype=np.int64)
    two = np.full(hosts.shape, 2, dtype=np.int64)
    seconds = {
        "host": host_s,
        "disk": instance_bytes / (DISK_RATE * hosts),
        "store": costs.collectives.seconds("send", prompt * memory.token, two, stride) / prompt,
    }
    tokens = {name: getattr(settings, f"{name}_cache") / instance_bytes for name in TIERS}
    of_ratio = settings.host_ratio * np.where(settings.host_ratio > 0.0, np.maximum(memory.cache_tokens, 0.0), 0.0)
    tokens["host"] = np.where(tokens["host"] > 0.0, tokens["host"], of_ratio)
    return {name: (tokens[name], seconds[name]) for name in TIERS if tokens[name].any()}


def reached(
    device: float, tiers: Iterable[tuple[str, float, float]], *, writes_through: bool, own_order: bool = False
) -> Iterator[Tier]:
    """Yield the tiers behind devices whose cache has `device` tokens. `tiers`: name, capacity and `token_s` of each."""
    reach = device
    for name, tokens, token_s in tiers:
        reach = tokens if own_order else max(reach, tokens) if writes_through else reach + tokens
        yield Tier(name, reach, token_s)


def cached_tokens(
    prompts: Iterable[Sequence[Part]],
    capacity: float,
    answers: Iterable[int] = (),
    *,
    whole: bool = False,
    page: int = 1,
    ahead: FloatArray | None = None,
) -> FloatArray:
    """Return how many tokens of each prompt are cached, if a cache of `capacity` tokens stores earlier prompts.

    `answers`: the tokens of each prompt's answer, which are stored, too, but never found: prompts contain other ones.
    `page`: only whole blocks of as many tokens are stored. `whole`: whether prompts are evicted as a whole, the
    beginning first. `ahead`: the first tokens of each prompt that faster tiers have; they are found, and not stored or
    refreshed.
    """
    cache, used, hits, lengths = OrderedDict[Hashable, int](), 0, list[float](), iter(answers)
    for number, parts in enumerate(prompts):
        hit, matches, place, first, past = 0, True, 0, 0, 0 if ahead is None else int(ahead[number])
        for name, size in parts:
            faster = min(max(past - place, 0), size)
            found = max(faster, min(cache.get(name, 0), size)) if matches else 0
            hit, matches, place, first = hit + found, matches and found == size, place + size, first + (faster == size)
        stored, rest = list[Part]([(("answer", number), next(lengths, 0))]), place % page
        for name, size in reversed(parts[first:]):  # without the end, which is in no whole block
            stored.append((name, size - min(rest, size)))
            rest -= min(rest, size)
        for name, size in reversed(stored) if whole else stored:
            cached = cache.pop(name, 0)
            cache[name] = max(size, cached)
            used += cache[name] - cached
        while used > capacity and cache:
            name, size = cache.popitem(last=False)
            used -= size
            if not whole and (rest := int(min(capacity - used, size))) > 0:  # the beginning of the part remains
                cache[name], used = rest, used + rest
                cache.move_to_end(name, last=False)
        hits.append(float(hit))
    return np.array(hits)
