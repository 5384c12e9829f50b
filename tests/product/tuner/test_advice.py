"""What plugins advise for a serving job."""

from dataclasses import replace

from flagcore_serving.job import Load, ServeSpec

from flagcore.domain.engine import PreferredSetting, TaskAdvice
from flagcore.domain.spec import Spec
from tests import tasks
from tests.tuner.stages.test_discover import advising, completed, loaded, plugin, spec


def test_auto_means_the_preferred_value_of_a_plugin() -> None:
    preferred = PreferredSetting(setting="engine_args.block-size", value=128, reason="kernels need it")
    plugins = loaded(a=advising(TaskAdvice(preferred=(preferred,))), x=plugin(tasks.CHIP))
    job = replace(spec(chip="test-chip", nodes=2), work=ServeSpec(engine="vllm", loads=()))

    def discovered(value: object) -> Spec:
        return completed(replace(job, space={} if value is None else {"block_size": value}), plugins).task.spec

    assert discovered(None).serve.engine_args == {"block-size": 128}
    assert discovered("auto").space == {"block_size": (128,)}
    assert discovered("auto").serve.engine_args == {}
    assert discovered((16, 32)).space == {"block_size": (16, 32)}


def test_a_plugin_can_leave_out_the_first_requests() -> None:
    plugins = loaded(a=advising(TaskAdvice(warmup=3)), x=plugin(tasks.CHIP))
    job = spec(chip="test-chip", nodes=2)
    loads = tuple(Load(warmup=requests) for requests in (0, 5))
    serve = completed(replace(job, work=ServeSpec(engine="vllm", loads=loads)), plugins).task.spec.serve
    assert [load.warmup for load in serve.loads] == [3, 5]
