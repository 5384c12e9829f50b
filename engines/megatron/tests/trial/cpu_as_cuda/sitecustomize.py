"""Makes torch.cuda mean the CPU in every Python process whose PYTHONPATH has this folder: Megatron-LM then trains here.

For tests: Megatron-LM's own files stay as they are. Each replacement is made when its module has been imported.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
import types
import typing

DEVICES = 8
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "as_tensor", "linspace")
LIKE_FUNCTIONS = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


def is_cuda(device):
    if isinstance(device, int):
        return not isinstance(device, bool)
    return device is not None and str(device).startswith("cuda")


def on_cpu(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


class Nothing:
    """A stream, an event, a context, a generator: whatever is called on it, nothing happens."""

    def __init__(self, *args, **kwargs):
        self.at = 0.0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Nothing()

    def __getitem__(self, key):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def record(self, *args):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)

    def query(self):
        return True


def torch_(torch):
    cpu = torch.device("cpu")
    for name in (*FACTORIES, *LIKE_FUNCTIONS):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    to, kind = torch.Tensor.to, torch.Tensor.type

    def moved(self, *args, **kwargs):
        if args and not isinstance(args[0], torch.Tensor) and is_cuda(args[0]):
            args = (cpu, *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = cpu
        return to(self, *args, **kwargs)

    def type_(self, *args, **kwargs):  # optimizers and the exchange of experts ask for torch.cuda.FloatTensor
        found = kind(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.to, torch.Tensor.type = moved, type_
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    cuda(torch)
    groups(torch)


def cuda(torch):
    memory = types.SimpleNamespace(
        name="CPU", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32
    )
    state = torch.default_generator
    numbers = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    used: list[int] = []
    ignored_functions = ("synchronize", "empty_cache", "init", "_lazy_init", "set_stream", "ipc_collect", "seed")
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: bool(used),
        "set_device": used.append,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": lambda: torch.device("cpu"),
        "get_device_capability": lambda *args: (9, 0),
        "get_device_properties": lambda *args: memory,
        "get_device_name": lambda *args: "CPU",
        "mem_get_info": lambda *args: (1 << 36, 80 << 30),
        "memory_stats": lambda *args: dict.fromkeys(
            [
                f"{each}.all.{when}"
                for each in ("allocated_bytes", "reserved_bytes", "allocation")
                for when in ("current", "peak")
            ],
            1 << 20,
        ),
        "reset_peak_memory_stats": lambda *args: None,
        "cudart": Nothing,
        "Stream": Nothing,
        "Event": Nothing,
        "stream": Nothing,
        "device": Nothing,
        "current_stream": Nothing,
        "default_stream": Nothing,
        "_lazy_call": lambda call, **kwargs: call(),
        "default_generators": type("Generators", (dict,), {"__missing__": lambda self, key: state})(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda new, *args, **kwargs: torch.set_rng_state(new),
        "manual_seed": lambda seed: state.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: state.manual_seed(int(seed)),
        **{name: lambda *args: 1 << 20 for name in numbers},  # one function for each: torch looks them up by identity
        **{name: lambda *args, **kwargs: None for name in ignored_functions},
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, answer)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: None)


def groups(torch):
    import torch.distributed as dist

    init, barrier, new_group = dist.init_process_group, dist.barrier, dist.new_group

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        return init("gloo", *args, **kwargs)

    def group(*args, pg_options=None, backend=None, **kwargs):
        return new_group(*args, backend="gloo", **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = group
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def kernels(module):
    module.load = lambda args: None  # compiles with nvcc


def norm(module):
    """Let torch's norm run under sequence parallelism: Megatron sums the gradients of weights that have this mark."""
    make = module.WrappedTorchNorm.__new__

    def new(cls, config, *args, **kwargs):
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm_module = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm_module.parameters():
            parameter.sequence_parallel = parallel
        return norm_module

    module.WrappedTorchNorm.__new__ = staticmethod(new)


def schedules(module):
    """Keep outputs until gloo has sent them: on a device, the stream does that."""
    import torch

    module.deallocate_output_tensor = lambda *args, **kwargs: None
    module.custom_backward = lambda output, gradient: torch.autograd.backward(output, grad_tensors=gradient)


def start(module):
    module._warmup_jit_function = lambda *args, **kwargs: None


def device(module):
    module.ACCELERATOR_SIZE = module.SIZE["cpu"]


def experts(module):
    """Read without transformer-engine, but bound with it only."""
    module.__dict__.setdefault("te_general_gemm", None)


PATCHES = {
    "torch": torch_,
    "megatron.legacy.fused_kernels": kernels,
    "megatron.core.transformer.torch_norm": norm,
    "megatron.core.transformer.moe.moe_utils": experts,
    "megatron.core.pipeline_parallel.schedules": schedules,
    "megatron.training.initialize": start,
    "flagcore_training.trial.rank_device": device,
}


class Patched(importlib.abc.MetaPathFinder):
    """Applies a patch after its module has been executed."""

    def find_spec(self, name, path=None, target=None):
        patch = PATCHES.pop(name, None)
        spec = importlib.util.find_spec(name) if patch else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


class NoTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for triton, which newer releases import without using it here."""

    def find_spec(self, name, path=None, target=None):
        wanted = name.partition(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def exec_module(self, module):
        module.__version__ = "0"
        module.__getattr__ = lambda name: getattr(Nothing(), name) if name.startswith("__") else Nothing()


os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if not hasattr(typing, "override"):  # newer releases are for Python 3.12
    typing.override = lambda method: method
sys.meta_path.insert(0, Patched())
sys.meta_path.append(NoTriton())
