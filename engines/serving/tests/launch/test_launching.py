"""How candidates become servers: devices of their own, ports found later, and the winner for users."""

import dataclasses
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_kubernetes.job import export as kubernetes
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_serving.job import Images, Load
from flagcore_serving.launch import export
from flagcore_serving.launch.server import Instance, TrialJob, as_text, read_job
from flagcore_serving.load.routing import NIXL
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines.tasks import serving
from flagcore.contracts import ExportJob, Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import DeviceResource, EngineSupport
from flagcore.domain.launch import PORT, Launch, ServerGroups
from flagcore.domain.space import Candidate
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import SpecError, UsageError
from tests.product.tasks import SOURCE
from tests.product.tasks import platform as small_platform

VISIBLE = "SOME_VISIBLE_DEVICES"
PICTURES = Images(buckets=((8, 16, 1.0),), base_items_per_request=2)
NO_LAUNCH = Launch(argv=("true",), folder="")


def on_cards(folder: Path, devices: int = 8, **arguments: Any) -> Platform:
    weights = folder / "weights.gguf"
    weights.touch()
    task = serving("llamacpp", devices=devices, weights=str(weights), command=("/bin/echo", "serve"), **arguments)
    support = EngineSupport(support=Support.YES, device_type="x", distributed_backend="y", visible_devices=(VISIBLE,))
    return dataclasses.replace(small_platform(task), support=support)


def launched(where: Platform, folder: Path, *, for_real: bool = False, **values: Any) -> Launch:
    candidate = Candidate.of({**LLAMACPP.defaults(where.task), **values})
    return LLAMACPP.launch(where, candidate, str(folder), for_real=for_real)


def instances(where: Platform, folder: Path, **values: Any) -> tuple[Instance, ...]:
    launched(where, folder, **values)
    return read_job(folder).instances


def composed(where: Platform, **values: Any) -> dict[str, Any]:
    candidate = Candidate.of({**LLAMACPP.defaults(where.task), **values})
    job = ExportJob(name="x", comments=(), platform=where, candidate=candidate, launch=NO_LAUNCH, devices=2)
    return dict(yaml.safe_load(LLAMACPP.export(job, "compose")[export.COMPOSE])["services"])


@pytest.mark.parametrize(
    ("count", "layers", "seen"),
    [
        (2, 4, ["0,1,2,3", "4,5,6,7"]),
        (4, 2, ["0,1", "2,3", "4,5", "6,7"]),
        (3, 2, ["0,1", "2,3", "4,5"]),
        (1, 1, ["0"]),
    ],
)
def test_each_instance_sees_only_its_devices(count: int, layers: int, seen: list[str], tmp_path: Path) -> None:
    found_instances = instances(on_cards(tmp_path), tmp_path, instances=count, pipeline_model_parallel_size=layers)
    assert [each.environment[VISIBLE] for each in found_instances] == seen


def test_servers_get_the_detected_devices_by_their_names(tmp_path: Path) -> None:
    names = {5: "", 7: "GPU-77", 2: "2", 4: ""}
    found = tuple(Device(index=index, chip="test-chip", name=name) for index, name in names.items())
    where = dataclasses.replace(on_cards(tmp_path, devices=4), devices=found)
    found_instances = instances(where, tmp_path, instances=2, pipeline_model_parallel_size=2)
    assert [each.environment[VISIBLE] for each in found_instances] == ["5,GPU-77", "2,4"]
    found_instances = instances(where, tmp_path, instances=3)
    assert [each.environment[VISIBLE] for each in found_instances] == ["5", "GPU-77", "2"]
    services = composed(where, instances=2, pipeline_model_parallel_size=2)
    assert [services[f"instance-{number}"]["environment"][VISIBLE] for number in (0, 1)] == ["5,GPU-77", "2,4"]


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = TrialJob(
        engine="a:B",
        instances=(
            Instance(
                argv=("serve", "{port}"),
                environment={"A": "1"},
                cores=(0, 1),
                requested={"parallel": 4, "flash_attention": "on", "enable_prefix_caching": True},
            ),
        ),
        loads=(Load(request_rate=float("inf")), Load(concurrency=3, trace="t"), Load(images=PICTURES)),
        vocab_size=9,
        timeout_s=1.5,
        slo={"ttft_s.p99": 1.0},
        patterns=LLAMACPP.failures,
        versions={"a": "1"},
    )
    (tmp_path / "serve.json").write_text(as_text(job))
    assert read_job(tmp_path) == job


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"instances": 3}', '{"loads": [{"request_rate": []}]}'])
def test_an_invalid_job_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "serve.json").write_text(text)
    with pytest.raises(ValueError, match=r"serve\.json is invalid"):
        read_job(tmp_path)


def test_a_trace_without_times_uses_the_default_clients_and_an_unreadable_one_is_reported(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    where = on_cards(tmp_path, loads=(Load(trace=str(trace)),))
    with pytest.raises(SpecError, match=r"serve.profile.trace = .* cannot be read"):
        LLAMACPP.ready(where.task.spec)
    trace.write_text('{"conversations": [{"value": "a question"}, {"value": "an answer"}]}\n')
    LLAMACPP.ready(where.task.spec)
    launched(where, tmp_path)
    assert [load.concurrency for load in read_job(tmp_path).loads] == [64]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"loads": (Load(num_prompts=None, concurrency=1),)}, "num_prompts"),
        ({"directory": "/no/such/folder"}, "serve.directory"),
        ({}, "auto_tuner.objective"),
    ],
)
def test_what_prevents_a_start_is_reported_before_anything_runs(tmp_path: Path, arguments: Any, key: str) -> None:
    spec = on_cards(tmp_path, **arguments).task.spec
    with pytest.raises(SpecError) as refused:
        LLAMACPP.ready(spec if arguments else dataclasses.replace(spec, objective="goodput_requests_per_s"))
    assert key in refused.value.key


@pytest.mark.parametrize(
    ("values", "requested"),
    [
        ({"parallel": 4, "n_gpu_layers": -1, "enable_prefix_caching": True}, {"parallel": 4}),
        ({"n_gpu_layers": 0, "enable_prefix_caching": False}, {"n_gpu_layers": 0, "enable_prefix_caching": False}),
    ],
)
def test_only_requested_values_must_be_read_back(tmp_path: Path, values: Any, requested: Any) -> None:
    assert instances(on_cards(tmp_path), tmp_path, **values)[0].requested == requested


def test_a_single_winner_is_started_with_the_engines_command(tmp_path: Path) -> None:
    best = launched(on_cards(tmp_path), tmp_path, for_real=True, parallel=4)
    assert best.argv[:2] == ("/bin/echo", "serve")
    assert best.argv[best.argv.index("--port") + 1] == PORT
    assert best.environment[VISIBLE] == "0"
    assert not (tmp_path / export.START).exists()


def test_several_winners_are_started_behind_a_balancer(tmp_path: Path) -> None:
    where = on_cards(tmp_path)
    best = launched(where, tmp_path, for_real=True, instances=2, pipeline_model_parallel_size=2)
    assert best.argv == ("/bin/bash", str(tmp_path / export.START))
    conf = best.script
    assert (tmp_path / export.START).read_text() == f"#!/bin/bash\n{conf}"
    assert "reverse_proxy 127.0.0.1:$((PORT + 1)) 127.0.0.1:$((PORT + 2)) {" in conf
    assert "lb_policy least_conn" in conf
    services = composed(where, instances=2, pipeline_model_parallel_size=2)
    assert list(services) == ["instance-0", "instance-1", "balancer"]
    assert [services[f"instance-{number}"]["environment"][VISIBLE] for number in (0, 1)] == ["0,1", "2,3"]
    weights = tmp_path / "weights.gguf"
    assert f"{weights}:{weights}:ro" in services["instance-0"]["volumes"]
    for number in (0, 1):
        argv = services[f"instance-{number}"]["entrypoint"]
        assert argv[argv.index("--port") + 1] == str(export.FRONT_PORT + 1 + number)
        assert argv[argv.index("--host") + 1] == "127.0.0.1"
        assert f'--port "$((PORT + {1 + number}))"' in conf
    assert services["balancer"]["depends_on"]["instance-1"] == {"condition": "service_healthy"}


def test_the_start_script_ends_all_servers_when_one_ends(tmp_path: Path) -> None:
    marks = [tmp_path / name for name in ("one", "two")]
    short = Instance(argv=("sh", "-c", f"touch {marks[0]}; sleep 0.2"))
    long = Instance(argv=("sh", "-c", f"touch {marks[1]}; echo $$ > {tmp_path}/pid; exec sleep 600"))
    script, balancer = tmp_path / "start.sh", tmp_path / export.BALANCER
    script.write_text(export.start_script([short, long]))
    start: Any = partial(subprocess.run, ["/bin/bash", str(script)], capture_output=True, text=True, timeout=60)
    done = start(check=False, env={"PATH": "/no/such/folder"})
    assert (done.returncode, done.stderr.strip()[:22]) == (2, "caddy is not installed")
    assert not any(mark.exists() for mark in marks)
    balancer.write_text("#!/bin/sh\nexec sleep 600\n")
    balancer.chmod(0o700)
    done = start(check=False, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 1
    assert "has ended" in done.stderr
    assert all(mark.exists() for mark in marks)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_containers_mount_the_targets_of_links_and_get_all_variables(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "1").touch()
    (snapshot / "model.safetensors").symlink_to(blobs / "1")
    instance = Instance(argv=("/opt/bin/serve", str(snapshot)), environment={"PRICE": "$5", "A": "own"})
    text = export.compose_file([instance], "/health", directory="/work", common={"A": "plugin", "B": "user"})
    (service,) = yaml.safe_load(text)["services"].values()
    assert {f"{place}:{place}:ro" for place in (blobs, snapshot, "/work")} < set(service["volumes"])
    assert service["environment"] == {"A": "own", "B": "user", "PRICE": "$$5"}


def on_two_hosts(folder: Path) -> Platform:
    """Two hosts with four cards each."""
    return on_cards(folder, devices=4, nodes=2, cluster=ClusterSpec(hosts=("a", "b"), nodes=2), launcher="ssh")


def test_instances_on_hosts_are_started_by_a_program_of_each_host(tmp_path: Path) -> None:
    started = launched(on_two_hosts(tmp_path), tmp_path, instances=3, pipeline_model_parallel_size=2)
    assert started.argv[-2:] == ("{node_rank}", "{node_ports}")
    assert started.client[-1] == str(tmp_path)
    job = read_job(tmp_path)
    assert job.hosts == ("a", "b")
    assert [(each.host, each.environment[VISIBLE]) for each in job.instances] == [(0, "0,1"), (0, "2,3"), (1, "0,1")]
    assert all("0.0.0.0" in each.argv for each in job.instances)


def test_winners_on_hosts_are_started_on_each_by_its_number(tmp_path: Path) -> None:
    where = on_two_hosts(tmp_path)
    best = launched(where, tmp_path, for_real=True, instances=2, pipeline_model_parallel_size=4)
    assert "NODE_RANK=1 on b" in best.missing
    assert best.ready == ()
    script = (tmp_path / export.START).read_text()
    own = script[script.index("1)\n") : script.index("esac")]
    assert '--port "$((PORT + 2))"' in own
    assert '--port "$((PORT + 1))"' not in own
    assert "b:$((PORT + 2))" in script
    subprocess.run(["bash", "-n", str(tmp_path / export.START)], check=True)


def test_an_instance_on_two_hosts_meets_at_the_first(tmp_path: Path) -> None:
    far = Instance(argv=("serve", "{head}:{head_port}", "{port}"), further=(("follow", "{head}:{head_port}"),), host=1)
    best = export.launch([far], str(tmp_path), "/work", "/health", ["a", "b", "c"])
    assert best.argv == ("/bin/bash", str(tmp_path / export.START))
    assert best.script.index('1)\nserve b:8500 "$PORT"') < best.script.index("2)\nfollow b:8500")
    assert export.BALANCER not in best.script


def on_two_kinds(folder: Path) -> Platform:
    """vLLM on four cards, with weights that need not exist."""
    task = serving("vllm", devices=4, weights=str(folder), command=("/bin/echo", "serve"), engine_version="0.32.0")
    support = EngineSupport(
        support=Support.YES,
        device_type="x",
        distributed_backend="y",
        visible_devices=(VISIBLE,),
        kubernetes=DeviceResource(name="some/device", source=SOURCE),
    )
    return dataclasses.replace(small_platform(task), support=support)


def of_pair(where: Platform, pair: str, **values: Any) -> Candidate:
    return Candidate.of({**VLLM.defaults(where.task), "prefill_decode": pair, **values})


def test_each_instance_of_a_trial_of_two_kinds_has_its_devices(tmp_path: Path) -> None:
    where = on_two_kinds(tmp_path)
    VLLM.launch(where, of_pair(where, "2xtp1+1xtp2"), str(tmp_path))
    job = read_job(tmp_path)
    assert [each.kind for each in job.instances] == ["prefill", "prefill", "decode"]
    assert [each.environment[VISIBLE] for each in job.instances] == ["2", "3", "0,1"]
    assert job.protocol == NIXL


def test_winners_of_two_kinds_are_started_behind_a_router(tmp_path: Path) -> None:
    where = on_two_kinds(tmp_path)
    candidate = of_pair(where, "1xtp1+1xtp1")
    found = VLLM.launch(where, candidate, str(tmp_path), for_real=True)
    script = (tmp_path / export.START).read_text()
    assert subprocess.run(["bash", "-n", found.argv[1]], check=True).returncode == 0
    for words in ('--prefill http://127.0.0.1:"$((PORT + 1))"', '--decode http://127.0.0.1:"$((PORT + 17))"'):
        assert words in script
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=18017" in script
    assert export.BALANCER not in script
    job = ExportJob(name="x", comments=(), platform=where, candidate=candidate, launch=NO_LAUNCH, devices=2)
    services = yaml.safe_load(VLLM.export(job, "compose")[export.COMPOSE])["services"]
    assert list(services) == ["instance-0", "instance-1", "router"]
    words = services["router"]["entrypoint"]
    assert (words[4], words[words.index("--decode") + 1]) == ("vllm-router", "http://127.0.0.1:8017")
    assert "pip install vllm-router==" in words[2]
    assert words[words.index("--host") + 1] == "0.0.0.0"


def test_pairs_that_a_target_cannot_start_are_refused(tmp_path: Path) -> None:
    where = on_two_kinds(tmp_path)
    candidate = of_pair(where, "1xtp1+1xtp1", kv_transfer="P2pNcclConnector")
    with pytest.raises(UsageError, match="vllm-router does not know kv_transfer = P2pNcclConnector"):
        VLLM.launch(where, candidate, str(tmp_path), for_real=True)
    with pytest.raises(UsageError, match="kv_transfer"):
        VLLM.servers(where, candidate, "x")


def test_a_prefix_aware_router_is_in_front_of_several_instances(tmp_path: Path) -> None:
    where = on_cards(tmp_path, prefix_aware=True)
    values = {"instances": 2, "pipeline_model_parallel_size": 4}
    launched(where, tmp_path, for_real=True, **values)
    start = (tmp_path / "start.sh").read_text()
    assert "vllm-router --policy cache_aware" in start
    assert 'http://127.0.0.1:"$((PORT + 1))" http://127.0.0.1:"$((PORT + 2))"' in start
    candidate = Candidate.of({**LLAMACPP.defaults(where.task), **values})
    job = ExportJob(name="x", comments=(), platform=where, candidate=candidate, launch=NO_LAUNCH, devices=8)
    assert "router" in yaml.safe_load(LLAMACPP.export(job, "compose")[export.COMPOSE])["services"]
    launched(where, tmp_path, **values)
    assert read_job(tmp_path).prefix_aware


def of_kinds(servers: ServerGroups | tuple[Candidate, int]) -> ServerGroups:
    assert isinstance(servers, ServerGroups)
    return servers


def manifests(where: Platform, candidate: Candidate, servers: ServerGroups) -> dict[tuple[str, str], Any]:
    job = ExportJob(
        name="x",
        comments=(),
        platform=where,
        candidate=candidate,
        launch=servers.groups[0].launch,
        devices=servers.groups[0].devices,
        servers=servers,
        options={"image": "i"},
    )
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(kubernetes(job)["x.yaml"])}


def test_kubernetes_starts_each_kind_with_names_that_the_router_has(tmp_path: Path) -> None:
    where = on_two_kinds(tmp_path)
    candidate = of_pair(where, "2xtp1+1xtp2")
    servers = of_kinds(VLLM.servers(where, candidate, "x"))
    found = manifests(where, candidate, servers)
    sets = [found["StatefulSet", f"x-{kind}"]["spec"] for kind in ("prefill", "decode")]
    assert [each["replicas"] for each in sets] == [2, 1]
    containers = [each["template"]["spec"]["containers"][0] for each in sets]
    assert [each["resources"]["limits"] for each in containers] == [{"some/device": 1}, {"some/device": 2}]
    variables = {each["name"]: each.get("value") for each in containers[0]["env"]}
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert VISIBLE not in variables
    assert found["Service", "x-prefill"]["spec"]["clusterIP"] == "None"
    front = found["Deployment", "x"]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert "--prefill http://x-prefill-1.x-prefill:8000 --decode http://x-decode-0.x-decode:8000" in front
    assert "vllm-router --vllm-pd-disaggregation" in front
    assert "--host 0.0.0.0" in front


def test_kubernetes_has_a_prefix_aware_router_in_front_of_several_instances(tmp_path: Path) -> None:
    where = on_cards(tmp_path, prefix_aware=True)
    support = dataclasses.replace(where.support, kubernetes=DeviceResource(name="x.com/card", source=SOURCE))
    where = dataclasses.replace(where, support=support)
    candidate = Candidate.of({**LLAMACPP.defaults(where.task), "instances": 2, "pipeline_model_parallel_size": 4})
    servers = of_kinds(LLAMACPP.servers(where, candidate, "x"))
    servers_set = manifests(where, candidate, servers)["StatefulSet", "x-server"]["spec"]
    assert servers_set["replicas"] == 2
    assert servers_set["template"]["spec"]["containers"][0]["resources"]["limits"] == {"x.com/card": 4}
    words = servers.front.argv
    assert words[words.index("--policy") + 1] == "cache_aware"
    assert [word for word in words if "x-server-" in word] == [
        f"http://x-server-{number}.x-server:8000" for number in range(2)
    ]
