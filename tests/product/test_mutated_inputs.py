"""Valid inputs of each grammar, changed at random: flagcore answers, or refuses with one message of its own words.

`make test` runs a few inputs of each grammar, `make test-long` some thousands. The seeds are fixed.
"""

import json
import os
import random
import re
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Flag
from tests.cli.conftest import flag as flag

SOURCES = yaml.safe_load(Path(__file__).with_name("mutated_inputs.yaml").read_text())
VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    10**30,
    1e308,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    [None],
    {"a": 1},
]
WORDS = [
    "",
    "x",
    "0",
    "-1",
    "1e30",
    "nan",
    "9" * 20,
    "a" * 300,
    "\0",
    "\u202e",
    "é",
    "../../etc/passwd",
    "$(x)",
    "${A}",
]
BYTES = [b"\0", b"'", b'"', b"\n", b"$", b"`", b"\xff", b"\\", b"${", b"$(", b"-", b"=", b" ", b"[1", b"{}"]
PYTHON = re.compile(
    r"Traceback|object has no attribute|NoneType|unhashable|not subscriptable|invalid literal for|unsupported operand|"
    r"\b(Assertion|Attribute|Index|Key|Overflow|Recursion|Type|Unicode\w+|Value|ZeroDivision)Error\b|RuntimeWarning|"
    r"indices must be|positional argument|not iterable|codec can't|embedded null|cannot convert|out of range"
)
SECONDS, BYTES_OF_MEMORY = 20, 1 << 30
Chance = random.Random
Arguments = Callable[[Chance, Path], list[str]]


def _places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield each element below `value`, as its parent and its key."""
    if parent is not None:
        yield parent, key
    for inner, each in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _places(each, value, inner)


def _changed(value: Any, chance: Chance) -> Any:
    """Return plain data with one to three elements replaced, removed, renamed or nested."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        parent, key = chance.choice([*_places(value)])
        how, old = chance.random(), parent.pop(key)
        new = old if how < 0.4 else chance.choice([*VALUES, *WORDS]) if how < 0.9 else [old]
        if isinstance(parent, list):
            parent.insert(key, new)
        elif how >= 0.15:
            parent[key if how >= 0.4 else chance.choice(["x", "a" * 300, "", "0", f"{key}s"])] = new
        if not [*_places(value)]:
            break
    return value


def _changed_text(text: bytes, chance: Chance) -> bytes:
    """Return a text, or bytes, with one to four bytes or words replaced, removed or added."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        place, how = chance.randrange(len(text) or 1), chance.random()
        words = list(re.finditer(rb"[^\s=]+", text))
        if how < 0.5 and words:
            word = chance.choice(words)
            text = text[: word.start()] + chance.choice([*BYTES, *map(str.encode, WORDS)]) + text[word.end() :]
        else:
            new = bytes([chance.randrange(256)]) if how < 0.7 else chance.choice(BYTES) if how < 0.85 else b""
            text = text[:place] + new + text[place + (0 if 0.7 <= how < 0.85 else chance.randrange(1, 20)) :]
    return text


def _gguf() -> bytes:
    """Return the head of a GGUF file of a small model: keys, and names and sizes of tensors."""

    def text(each: str) -> bytes:
        return struct.pack("<Q", len(each)) + each.encode()

    sizes = {"block_count": 4, "embedding_length": 256, "feed_forward_length": 512, "context_length": 4096}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("qwen3")]
    keys += [text(f"qwen3.{name}") + struct.pack("<II", 4, size) for name, size in sizes.items()]
    keys.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"))
    tensors = {"token_embd.weight": (256, 1000), "blk.0.attn_q.weight": (256, 256), "blk.0.ffn_up.weight": (256, 512)}
    listed = [text(name) + struct.pack("<IQQIQ", 2, *shape, 8, 0) for name, shape in tensors.items()]
    return b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(keys)) + b"".join([*keys, *listed])


def _safetensors() -> bytes:
    names = [
        f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")
    ]
    tensor = {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [0, 2 * 4096**2]}
    head = json.dumps(dict.fromkeys(names, tensor)).encode()
    return struct.pack("<Q", len(head)) + head


def _written(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith((".yaml", ".json", ".jsonl")):
        lines = content if name.endswith(".jsonl") and isinstance(content, list) else [content]
        text = yaml.safe_dump(content) if name.endswith(".yaml") else "\n".join(map(json.dumps, lines))
        content = text.encode(errors="replace")
    path.write_bytes(content)
    return str(path)


FIT_ONE_DEVICE = ("ct", "gptq", "nemotronh")
PLAN = ["--chip", "H100-SXM", "--devices", "1", "--json", "--quiet"]


def _grammars() -> Iterator[tuple[str, Arguments]]:
    """Yield the grammars by name, each with the function that writes a changed input and returns flag's arguments."""
    for name, spec in SOURCES["specs"].items():
        yield (
            f"spec {name}",
            lambda chance, to, spec=spec: [
                *("estimate", _written(to, "spec.yaml", _changed(spec, chance)), "--json", "--quiet")
            ],
        )
    yield (
        "records",
        lambda chance, to: [*("estimate", "--jobs", _written(to, "jobs.jsonl", _changed(SOURCES["records"], chance)))],
    )
    for name, config in SOURCES["configs"].items():
        engine = "vllm" if name in FIT_ONE_DEVICE else "megatron"  # servers that do not fit take seconds
        yield (
            f"config {name}",
            lambda chance, to, config=config, engine=engine: [
                *("estimate", "--model", str(Path(_written(to, "model/config.json", _changed(config, chance))).parent)),
                *("--engine", engine, *PLAN),
            ],
        )
    for name, manifest in SOURCES["manifests"].items():
        yield (
            f"manifest {name}",
            lambda chance, to, manifest=manifest: [
                *("import", _written(to, "manifest.yaml", _changed(manifest, chance)), "--chip", "H100-SXM")
            ],
        )
    for name, config in SOURCES["trainers"].items():
        yield (
            f"file of {name}",
            lambda chance, to, name=name, config=config: [
                *("import", "--", *name.split(), _written(to, "train.yaml", _changed(config, chance)))
            ],
        )
    for name, script in SOURCES["scripts"].items():
        yield (
            f"script {name}",
            lambda chance, to, script=script: [
                *("import", _written(to, "start.sh", _changed_text(script.encode(), chance)), "--chip", "H100-SXM")
            ],
        )
    yield (
        "TOML",
        lambda chance, to: [
            *("import", "--", "torchrun", "--nproc_per_node", "8", "-m", "torchtitan.train", "--job.config_file"),
            _written(to, "train.toml", _changed_text(SOURCES["toml"].encode(), chance)),
        ],
    )
    yield (
        "GGUF",
        lambda chance, to: [
            *(
                "estimate",
                "--model",
                _written(to, "x.gguf", _changed_text(_gguf(), chance)),
                "--engine",
                "llamacpp",
                *PLAN,
            )
        ],
    )
    yield "safetensors", _plan_of_safetensors


def _plan_of_safetensors(chance: Chance, folder: Path) -> list[str]:
    _written(folder, "model/x.safetensors", _changed_text(_safetensors(), chance))
    config = _written(folder, "model/config.json", SOURCES["configs"]["ct"])
    return ["estimate", "--model", str(Path(config).parent), "--engine", "vllm", *PLAN]


GRAMMARS = dict(_grammars())


def _check(flag: Flag, grammar: str, seeds: range, folder: Path) -> None:
    """Read the changed inputs of a grammar with these seeds, and list those without a right answer."""
    wrong, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        arguments = GRAMMARS[grammar](Chance(f"{grammar} {seed}"), folder)
        start = os.times().user  # not the system's: CPython 3.11 may map a page a call, at some depths of the stack
        ran = flag(*arguments)
        seconds = os.times().user - start
        is_plan = ran.code == 0 and "--json" in arguments
        numbers = re.search(r"\b(NaN|-?Infinity)\b", ran.out) if is_plan else None
        words = PYTHON.search(ran.err) or numbers
        if ran.code not in (0, 2, 3, 4, 5, 6) or words or (ran.code and not ran.err.strip()) or seconds > SECONDS:
            wrong.append((seed, ran.code, f"{seconds:.1f} s", words and words[0], ran.err[-300:]))
    assert not wrong, "\n".join(map(str, wrong))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES_OF_MEMORY


@pytest.mark.costly
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_changed_input_is_answered_or_refused(flag: Flag, grammar: str, tmp_path: Path) -> None:
    _check(flag, grammar, range(7), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_many_changed_inputs_are_answered_or_refused(flag: Flag, grammar: str, tmp_path: Path) -> None:
    _check(flag, grammar, range(7, 180), tmp_path)


@pytest.mark.parametrize("value", ["x", 1, [{"space": {}}]])
def test_a_section_of_another_type_is_named(flag: Flag, value: object, tmp_path: Path) -> None:
    spec = _written(tmp_path, "spec.yaml", {**SOURCES["specs"]["serve"], "auto_tuner": value})
    flag("estimate", spec, "--quiet").refused(2, "auto_tuner", "must be a mapping")

    record = _written(tmp_path, "jobs.jsonl", [{**SOURCES["records"][1], "kind": ["serve"]}, SOURCES["records"][0]])
    lines = flag("estimate", "--jobs", record).worked().out.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["invalid", "ok"]
