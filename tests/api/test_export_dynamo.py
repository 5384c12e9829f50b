"""Exports to NVIDIA Dynamo."""

import json
from pathlib import Path

import pytest
import yaml

from tests.api.test_export import SCHEMAS, exported, only, server, written

PAIRS = "prefill_decode=2xtp1+1xtp2"
DYNAMO = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "nvidia.com/v1beta1"},
        "kind": {"const": "DynamoGraphDeployment"},
        "spec": {
            "additionalProperties": False,
            "properties": {
                "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
                "components": {
                    "maxItems": 25,
                    "items": {
                        "additionalProperties": False,
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$"},
                            "type": {"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
                            "replicas": {"type": "integer", "minimum": 0},
                            "multinode": {
                                "additionalProperties": False,
                                "properties": {"nodeCount": {"type": "integer", "minimum": 2}},
                            },
                            "podTemplate": {"$ref": "#/definitions/io.k8s.api.core.v1.PodTemplateSpec"},
                        },
                    },
                },
            },
        },
    },
    "definitions": SCHEMAS["definitions"],
}
"""The fields that exports may use, from `deploy/operator/api/v1beta1/*_types.go` of github.com/ai-dynamo/dynamo, from
which its CRD is generated (commits 0fddc01b and 006b6e10, 2026).
"""


@pytest.mark.parametrize(
    ("engine", "candidate", "workers"),
    [
        ("vllm", "instances=2, tp=2", {"worker": (2, ["--tensor-parallel-size", "2"])}),
        ("vllm", "instances=1, tp=8", {"worker": (1, ["--tensor-parallel-size", "8"])}),
        (
            "vllm",
            PAIRS,
            {"prefill": (2, ["--disaggregation-mode", "prefill"]), "decode": (1, ["--kv-transfer-config"])},
        ),
        ("sglang", PAIRS, {"prefill": (2, ["--host", "0.0.0.0"]), "decode": (1, ["--disaggregation-mode", "decode"])}),
    ],
)
def test_a_graph_of_dynamo_fits_its_fields(
    engine: str, candidate: str, workers: dict[str, tuple[int, list[str]]], tmp_path: Path
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    hosts = 2 if candidate.endswith("8") else 1
    spec = server(tmp_path, cluster={"chip": "H100-SXM", "nodes": hosts, "devices_per_node": 4})
    data = json.loads(spec.read_text())
    space = {"prefill_decode": [None, "2xtp1+1xtp2"], "instances": "auto"}
    data["auto_tuner"] = {"space": {**space, "tensor_model_parallel_size": "auto"}}
    data["serve"] |= {
        "engine": engine,
        "engine_args": {"served_model_name": "$(HF_TOKEN)", "chat_template": "chat.jinja"},
    }
    options = {"image": "runtime:1.3.1", "volume": "models:/models"}
    graph = yaml.safe_load(only(exported(written(tmp_path, data), "dynamo", candidate, options=options)))
    jsonschema.Draft7Validator(DYNAMO).validate(graph)
    frontend, *components = graph["spec"]["components"]
    assert frontend["type"] == "frontend"
    assert {each["name"]: each["replicas"] for each in components} == {name: n for name, (n, _args) in workers.items()}
    for each in components:
        assert "$$(HF_TOKEN)" in each["podTemplate"]["spec"]["containers"][0]["args"]  # Kubernetes reads $(HF_TOKEN)
        (container,) = each["podTemplate"]["spec"]["containers"]
        assert each.get("multinode", {"nodeCount": 1})["nodeCount"] == hosts
        assert container["command"] == ["python3", "-m", f"dynamo.{engine}"]
        assert set(workers[each["name"]][1]) <= set(container["args"])
        assert not {"--port", "--nnodes", "127.0.0.1"} & set(container["args"])
        assert ("--chat-template" in container["args"]) == (engine == "sglang")
        assert not any("DEVICES" in variable["name"] for variable in container["env"])


@pytest.mark.parametrize(("router", "mode"), [("prefix_aware", "kv"), ("least_requests", "least-loaded")])
def test_dynamo_routes_as_trials(router: str, mode: str, tmp_path: Path) -> None:
    spec = server(tmp_path, cluster={"chip": "H100-SXM", "nodes": 1, "devices_per_node": 4})
    data = json.loads(spec.read_text())
    data["serve"] |= {"engine": "vllm", "router": router}
    graph = yaml.safe_load(
        only(exported(written(tmp_path, data), "dynamo", "instances=2", options={"image": "runtime:1.3.1"}))
    )
    (container,) = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"]
    assert {"name": "DYN_ROUTER_MODE", "value": mode} in container["env"]
