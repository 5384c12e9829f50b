"""Lists the settings of a release of DeepSpeed, torchtitan or Hugging Face's Trainer, as its source defines them.

`python tools/trainer_settings.py ENGINE SOURCE | sort -u - FILE -o FILE` adds them to the FILE
`engines/trainers/tests/settings/ENGINE.txt`. SOURCE is the folder of the package `deepspeed`, `torchtitan` or
`transformers`. No module is imported.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

CLASSES: Mapping[str, Mapping[str, str]] = {
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

READ = {
    "initialize": {"config": ""},
    "_configure_basic_optimizer": {"optimizer_parameters": "optimizer.params"},
    "RandomLTDScheduler": {"config": "data_efficiency.data_routing.random_ltd"},
    "CurriculumScheduler": {"config": "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen"},
}
"""Functions and classes of DeepSpeed, and the sections of their variables that are dictionaries of settings."""
OPTIMIZERS = ("adam", "adagrad", "lamb", "lion", "onebit", "muon")
"""The folders of DeepSpeed's optimizers, whose arguments are settings."""
OF_CODE = {"self", "params", "model_params", "param_groups", "optimizer", "deepspeed"}
OF_CODE |= {"adam_optimizer", "adam_optimizer_kwargs", "fallback_to_inline"}
"""Arguments that are no settings."""
GETTERS = {"get_scalar_param", "get_list_param", "get_dict_param"}
COPIES = {"copy", "deepcopy", "dict"}


def fields(tree: ast.AST, sections: Mapping[str, str], classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the settings that are fields of classes, with their aliases; those of nested classes after a dot."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name not in sections:
            continue
        inner = (each for each in node.body if isinstance(each, ast.ClassDef) and each.name == "Config")
        body = next(inner, node).body
        for field in (each for each in body if isinstance(each, ast.AnnAssign)):
            kind, name = ast.unparse(field.annotation), ast.unparse(field.target)
            kind = kind.removeprefix("Optional[").removesuffix("]").removesuffix(" | None")
            start = f"{sections[node.name]}.{name}".lstrip(".")
            if kind in classes and any(isinstance(each, ast.AnnAssign) for each in classes[kind].body):
                yield from fields(classes[kind], {kind: start}, classes)
                continue
            aliases = [each.value for each in getattr(field.value, "keywords", ()) if each.arg == "alias"]
            yield start.removesuffix(name) + (ast.literal_eval(aliases[0]) if aliases else name)


class DeepSpeedKeys:
    """The keys of DeepSpeed's configuration: its code is followed from the class that reads the whole dictionary.

    A dictionary of settings is known by its section, as in `zero_optimization.offload_param`.
    """

    def __init__(self, source: Path) -> None:
        self.found = set[str]()
        self.classes = dict[str, ast.ClassDef]()
        files = sorted(each for each in source.glob("**/*.py") if each.parent.name != "quantization")
        self._files = {file: ast.parse(file.read_text("utf-8")) for file in files}
        self._defined = dict[str, tuple[ast.FunctionDef | ast.ClassDef, Path]]()
        self._values = dict[tuple[Path, str], ast.expr]()
        self._followed = set[object]()
        for file, tree in self._files.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self._defined.setdefault(node.name, (node, file))
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, node)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._values[file, node.targets[0].id] = node.value
        for name, sections in READ.items():
            self.call(self._defined.get(name), [], **sections)
        self.found |= {*self._arguments()}

    def _arguments(self) -> Iterator[str]:
        """Yield the arguments of optimizers and of schedules of the learning rate."""
        for file, tree in self._files.items():
            schedules = file.name == "lr_schedules.py"
            if not schedules and file.parent.name not in OPTIMIZERS:
                continue
            section = "scheduler.params" if schedules else "optimizer.params"
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    names = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
                    yield from (f"{section}.{name}" for name in names - OF_CODE)

    def defined(self, name: str, near: ast.AST, file: Path) -> tuple[ast.FunctionDef | ast.ClassDef, Path] | None:
        """Return the function or class of a name, which may be in another function or class, and its file."""
        inner = (each for each in ast.walk(near) if isinstance(each, ast.FunctionDef) and each.name == name)
        node = next(inner, None)
        return (node, file) if node else self._defined.get(name)

    def call(
        self, called: tuple[ast.FunctionDef | ast.ClassDef, Path] | None, sections: list[str | None], **known: str
    ) -> str | None:
        """Follow a function, or the reading of a dictionary by a class. Return the section of what it returns."""
        given = [each for each in sections if each is not None]
        if called is None or not (given or known):
            return None
        owner, file = called
        node = owner if isinstance(owner, ast.FunctionDef) else None
        if isinstance(owner, ast.ClassDef):
            if given:
                self.found |= {*fields(owner, {owner.name: given[0]}, self.classes)}
            methods = [each for each in owner.body if isinstance(each, ast.FunctionDef)]
            node = next((each for each in methods if each.name == "__init__"), None)
            sections = [None, *sections]
        if node is None or (node, *sections, *known.items()) in self._followed:
            return None
        self._followed.add((node, *sections, *known.items()))
        names = [each.arg for each in node.args.args]
        return _Body(self, owner, file, {**dict(zip(names, sections, strict=False)), **known}).read(node)

    def names(self, key: ast.expr, file: Path) -> list[str]:
        """Return the texts that a key may be."""
        if isinstance(key, ast.Constant):
            return [key.value] if isinstance(key.value, str) else []
        if isinstance(key, ast.Dict | ast.Tuple | ast.List):
            items = [each for each in (key.keys if isinstance(key, ast.Dict) else key.elts) if each]
            return [name for each in items for name in self.names(each, file)]
        if isinstance(key, ast.Name):
            near = {**{place: 2 for place, _ in self._values}, file.with_name("constants.py"): 1, file: 0}
            places = sorted((place for place, name in self._values if name == key.id), key=near.__getitem__)
            return self.names(self._values[places[0], key.id], places[0]) if places else []
        return []


class _Body:
    """The body of a function, with the sections of its variables and of its object's attributes."""

    def __init__(self, keys: DeepSpeedKeys, owner: ast.AST, file: Path, sections: dict[str, str | None]) -> None:
        self._keys, self._owner, self._file = keys, owner, file
        self._sections = {name: section for name, section in sections.items() if section is not None}
        self._looped = dict[str, list[str]]()

    def read(self, node: ast.FunctionDef) -> str | None:
        """Add the keys that the body reads. Return the section of what it returns."""
        returned = None
        self._near: ast.AST = self._owner if isinstance(self._owner, ast.ClassDef) else node
        for each in sorted(ast.walk(node), key=lambda each: getattr(each, "lineno", 0)):
            if isinstance(each, ast.Assign) and (section := self._section(each.value)) is not None:
                for target in each.targets:
                    self._sections.setdefault(ast.unparse(target), section)
            elif isinstance(each, ast.For):
                self._loop(each)
            elif isinstance(each, ast.Return) and each.value and returned is None:
                returned = self._section(each.value)
            elif isinstance(each, ast.expr):
                self._section(each)
        return returned

    def _loop(self, node: ast.For) -> None:
        """Learn the values of a loop's variable; the items of settings may overwrite a dictionary of defaults."""
        first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
        match node.iter:
            case ast.Call(func=ast.Attribute(value=looped)) | looped:
                self._looped[ast.unparse(first)] = self._keys.names(looped, self._file)
        if section := self._section(node.iter):
            for each in node.body:
                if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Subscript):
                    defaults = self._keys.names(each.targets[0].value, self._file)
                    self._keys.found |= {f"{section}.{name}" for name in defaults}

    def _section(self, value: ast.expr) -> str | None:
        """Return the section of a value, or None if it is no dictionary of settings. Add the keys that are read."""
        match value:
            case ast.Name() | ast.Attribute():
                return self._sections.get(ast.unparse(value))
            case ast.Subscript(value=inner, slice=key):
                return self._at(inner, key)
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[inner]):
                self._at(inner, key)
            case ast.Call(func=ast.Attribute(value=inner, attr="get" | "pop"), args=[key, *_]):
                return self._at(inner, key)
            case ast.Call(func=ast.Name(id=name), args=[inner, key, *_]) if name in GETTERS:
                return self._at(inner, key)
            case ast.Call(func=ast.Attribute(value=inner, attr="keys" | "items")):
                return self._section(inner)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[inner]) if name in COPIES:
                return self._section(inner)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as called):
                given = [self._section(each) for each in (*value.args, *(each.value for each in value.keywords))]
                if not ast.unparse(called).startswith("self."):
                    return self._keys.call(self._keys.defined(name, self._near, self._file), given)
                known = {name: section for name, section in self._sections.items() if name.startswith("self.")}
                method = self._keys.defined(name, self._near, self._file)
                return self._keys.call(method, [None, *given], **known)
            case ast.IfExp(body=first, orelse=second):
                return next((each for each in map(self._section, (first, second)) if each is not None), None)
            case ast.DictComp(value=inner, generators=[generator]):
                self._looped[ast.unparse(generator.target)] = self._keys.names(generator.iter, self._file)
                return "" if self._section(inner) is not None else None
        return None

    def _at(self, inner: ast.expr, key: ast.expr) -> str | None:
        """Add a key of a dictionary of settings. Return its section."""
        if (section := self._section(inner)) is None:
            return None
        names = self._looped.get(ast.unparse(key)) or self._keys.names(key, self._file)
        found = [f"{section}.{name}".lstrip(".") for name in names]
        self._keys.found |= {*found}
        return found[0] if len(found) == 1 else section


def settings(engine: str, source: Path) -> list[str]:
    """Return the sorted names of the settings."""
    if engine == "deepspeed":
        found = DeepSpeedKeys(source).found
        return sorted(found - {name.rpartition(".")[0] for name in found})
    trees = [ast.parse(file.read_text("utf-8")) for file in source.glob("**/*.py") if not OTHERS & {*file.parts}]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    sections = {"JobConfig": ""} if "JobConfig" in classes else CLASSES[engine]
    return sorted({name for tree in trees for name in fields(tree, sections, classes)})


if __name__ == "__main__":
    print("\n".join(settings(sys.argv[1], Path(sys.argv[2]))))
