"""Lists the settings of a release of DeepSpeed, torchtitan or Hugging Face's Trainer, as its source defines them.

`python tools/trainer_settings.py ENGINE SOURCE > engines/trainers/tests/settings/ENGINE-RELEASE.txt`. SOURCE is the
folder of the package `deepspeed`, `torchtitan` or `transformers`. No module is imported.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

CLASSES: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "DeepSpeedZeroConfig": "zero_optimization",
        "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
        "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
        "ZenFlowConfig": "zero_optimization.zenflow",
        "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
        "CompileConfig": "compile",
        "TPTrainingConfig": "tensor_parallel",
        "DeepSpeedBF16Config": "bf16",
        "DeepSpeedFP16Config": "fp16",
        "CommsLoggerConfig": "comms_logger",
        "TensorBoardConfig": "tensorboard",
        "WandbConfig": "wandb",
        "CometConfig": "comet",
        "CSVConfig": "csv_monitor",
        "DeepSpeedThroughputTimerConfig": "timers.throughput",
    },
    "torchtitan": {
        "TrainingConfig": "training",
        "ParallelismConfig": "parallelism",
        "CompileConfig": "compile",
        "CommConfig": "comm",
        "DebugConfig": "debug",
        "MetricsProcessor": "metrics",
        "Profiler": "profiler",
        "OptimizersContainer": "optimizer",
        "LRSchedulersContainer": "lr_scheduler",
        "BaseCheckpointManager": "checkpoint",
        "Validator": "validator",
    },
    "huggingface": {"TrainingArguments": ""},
}
"""The classes whose fields are settings, with the section of the settings."""
OTHERS = {"experiments", "models"}
"""Folders with settings of single models."""
SECTIONS = ("ACT_CHKPT", "AIO", "FLOPS_PROFILER", "CHECKPOINT", "DATA_TYPES", "TORCH_AUTOCAST", "DATA_EFFICIENCY")
"""The sections of DeepSpeed whose keys are constants with the name of the section as their start."""


def fields(tree: ast.AST, sections: Mapping[str, str], classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the settings that are fields of classes, with their aliases; those of nested classes after a dot."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name not in sections:
            continue
        inner = (each for each in node.body if isinstance(each, ast.ClassDef) and each.name == "Config")
        body = next(inner, node).body
        for field in (each for each in body if isinstance(each, ast.AnnAssign)):
            kind, name = ast.unparse(field.annotation), ast.unparse(field.target)
            start = f"{sections[node.name]}.{name}".lstrip(".")
            if kind in classes and any(isinstance(each, ast.AnnAssign) for each in classes[kind].body):
                yield from fields(classes[kind], {kind: start}, classes)
                continue
            aliases = [each.value for each in getattr(field.value, "keywords", ()) if each.arg == "alias"]
            yield start.removesuffix(name) + (ast.literal_eval(aliases[0]) if aliases else name)


def constants(source: Path) -> Iterator[str]:
    """Yield the keys of DeepSpeed that are constants and that `runtime/config.py` reads."""
    texts = dict[str, str]()
    for file in [*source.glob("**/constants.py"), *source.glob("**/config.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                texts |= {ast.unparse(each): node.value.value for each in node.targets}
    for node in ast.walk(ast.parse((source / "runtime/config.py").read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("get_scalar_param(param_dict, "):
            yield texts.get(ast.unparse(node.args[1]), "")
    for section in SECTIONS:
        names = [
            each for each in texts if each.startswith(f"{section}_") and not each.endswith(("_DEFAULT", "_FORMAT"))
        ]
        yield from (f"{texts[section]}.{texts[each]}" for each in names if texts[each].isidentifier())


def settings(engine: str, source: Path) -> list[str]:
    """Return the sorted names of the settings."""
    trees = [ast.parse(file.read_text("utf-8")) for file in source.glob("**/*.py") if not OTHERS & {*file.parts}]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    sections = {"JobConfig": ""} if "JobConfig" in classes else CLASSES[engine]
    found = {name for tree in trees for name in fields(tree, sections, classes)}
    return sorted((found | {*constants(source)} if engine == "deepspeed" else found) - {""})


if __name__ == "__main__":
    print("\n".join(settings(sys.argv[1], Path(sys.argv[2]))))
