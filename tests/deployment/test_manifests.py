"""The manifests: what Kubernetes' own types say of them, and whether they fit each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from userspace_proxy.node.capabilities import missing_capabilities

FOLDER = Path(__file__).parents[2] / "docker"
VERBS = {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

Object = dict[str, Any]


def objects(folder: str) -> dict[str, Object]:
    """Return all objects of the manifests in a folder by kind."""
    paths = sorted((FOLDER / folder).glob("*.yaml"))
    found = [each for path in paths for each in yaml.safe_load_all(path.read_text())]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


OBJECTS = objects("kubernetes")
OPTIONAL = objects("kubernetes/optional")
POD: Object = OBJECTS["DaemonSet"]["spec"]["template"]["spec"]
CONTAINER: Object = POD["containers"][0]
INIT: Object = POD["initContainers"][0]
CONFIG_MAP: Object = OBJECTS["ConfigMap"]
CONFIG: Object = yaml.safe_load(CONFIG_MAP["data"]["config.conf"])


def unknown_fields(value: Any, type_name: str, place: str) -> list[str]:
    """Return the places of all fields that the API's types do not have."""
    if (inner := re.fullmatch(r"(?:List\[|Dict\[str, )(.*)\]", type_name)) is not None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [field for key, item in items for field in unknown_fields(item, inner[1], f"{place}.{key}")]
    model = getattr(client, type_name, None)
    if model is None:
        return []
    types = {wire: model.openapi_types[name] for name, wire in model.attribute_map.items()}
    return [f"{place}.{key}" for key in value.keys() - types.keys()] + [
        field
        for key in value.keys() & types.keys()
        for field in unknown_fields(value[key], types[key], f"{place}.{key}")
    ]


@pytest.mark.parametrize("objects", [OBJECTS, OPTIONAL], ids=["usual", "optional"])
@pytest.mark.parametrize(
    ("kind", "type_name"),
    [
        ("DaemonSet", "V1DaemonSet"),
        ("ConfigMap", "V1ConfigMap"),
        ("ServiceAccount", "V1ServiceAccount"),
        ("ClusterRole", "V1ClusterRole"),
        ("ClusterRoleBinding", "V1ClusterRoleBinding"),
    ],
)
def test_objects_have_the_fields_and_types_of_the_api(kind: str, type_name: str, objects: dict[str, Object]) -> None:
    if kind in objects:
        getattr(client, type_name).model_validate(objects[kind], strict=True)
        assert unknown_fields(objects[kind], type_name, kind) == []


def test_the_check_of_fields_finds_faults() -> None:
    broken = {"spec": {"selector": {}, "template": {"spec": {"containers": [{"nam": "x"}], "hostNetwork": "yes"}}}}
    assert unknown_fields(broken, "V1DaemonSet", "x") == ["x.spec.template.spec.containers.0.nam"]
    with pytest.raises(ValueError, match="3 validation errors"):
        client.V1DaemonSet.model_validate(broken, strict=True)


def test_what_is_referred_to_is_there() -> None:
    name = OBJECTS["ServiceAccount"]["metadata"]["name"]
    assert POD["serviceAccountName"] == name
    for objects in (OBJECTS, OPTIONAL):
        assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
        (subject,) = objects["ClusterRoleBinding"]["subjects"]
        assert (subject["name"], subject["namespace"]) == (name, OBJECTS["DaemonSet"]["metadata"]["namespace"])
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert volumes["config"]["configMap"]["name"] == CONFIG_MAP["metadata"]["name"]
    for container in (CONTAINER, INIT):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    labels = OBJECTS["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_command_line_is_kube_proxys() -> None:
    assert CONTAINER["args"] == ["--config=/var/lib/kube-proxy/config.conf", "--hostname-override=$(NODE_NAME)"]
    assert INIT["args"] == [*CONTAINER["args"], "--init-only"]
    (mount,) = (each for each in CONTAINER["volumeMounts"] if each["name"] == "config")
    assert CONFIG["clientConnection"]["kubeconfig"] == f"{mount['mountPath']}/kubeconfig.conf"
    assert "kubeconfig.conf" in CONFIG_MAP["data"]
    assert "env" in CONTAINER


@pytest.mark.parametrize(("probe", "path"), [("livenessProbe", "/livez"), ("readinessProbe", "/healthz")])
def test_probes_ask_where_the_health_server_listens(probe: str, path: str) -> None:
    get = CONTAINER[probe]["httpGet"]
    (port,) = (each["containerPort"] for each in CONTAINER["ports"] if each["name"] == get["port"])
    assert get["path"] == path
    assert CONFIG["healthzBindAddress"].endswith(f":{port}")


def test_the_proxy_has_exactly_the_capabilities_it_needs_and_no_other_privilege() -> None:
    security = CONTAINER["securityContext"]
    missing = missing_capabilities("legacy", ())
    needed = {each.name.removeprefix("CAP_") for each in (*missing.needed, *missing.wanted)}
    assert set(security["capabilities"]["add"]) == needed == {"NET_ADMIN", "NET_RAW", "NET_BIND_SERVICE"}
    assert security["capabilities"]["drop"] == ["ALL"]
    assert not security["allowPrivilegeEscalation"]
    assert "privileged" not in security
    assert INIT["securityContext"]["privileged"]


def test_the_pod_is_one_that_a_node_needs() -> None:
    assert POD["hostNetwork"]
    assert POD["priorityClassName"] == "system-node-critical"
    assert POD["tolerations"] == [{"operator": "Exists"}]
    hosts = {each["hostPath"]["path"] for each in POD["volumes"] if "hostPath" in each}
    assert hosts == {"/run/xtables.lock", "/lib/modules"}


def test_the_configuration_is_of_the_kind_that_is_read() -> None:
    assert (CONFIG["apiVersion"], CONFIG["kind"]) == ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration")
    assert CONFIG["mode"] == "userspace"


def test_rules_name_verbs_that_there_are() -> None:
    for rule in (*OBJECTS["ClusterRole"]["rules"], *OPTIONAL["ClusterRole"]["rules"]):
        assert set(rule["verbs"]) <= VERBS
        assert "*" not in (*rule["resources"], *rule["apiGroups"])


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with continued lines joined."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_built_on_an_exact_tag_in_two_stages() -> None:
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases[0])


def test_the_image_runs_the_program_as_nobody_and_checks_its_health() -> None:
    last = dict(instructions())
    assert last["ENTRYPOINT"] == '["userspace-proxy"]'
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"])
    assert "http://127.0.0.1:10256/livez" in last["HEALTHCHECK"]


def test_all_that_the_image_copies_is_in_the_context() -> None:
    root = FOLDER.parent
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for name in rest.split()[:-1]:
                assert name in allowed
                assert (root / name).exists()


def unit() -> dict[str, list[str]]:
    """Return the settings of the unit, each with all its values."""
    settings: dict[str, list[str]] = {}
    for line in (FOLDER / "systemd" / "userspace-proxy.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_waits_for_readiness_and_ends_in_time() -> None:
    settings = unit()
    assert settings["Type"] == ["notify"]
    assert settings["Restart"] == ["always"]
    assert settings["CapabilityBoundingSet"] == ["CAP_NET_ADMIN CAP_NET_RAW CAP_NET_BIND_SERVICE"]
    (before,), (start,) = settings["ExecStartPre"], settings["ExecStart"]
    assert before == f"+{start} --init-only"
