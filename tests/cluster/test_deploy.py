"""The manifest in docs/deploy is what JobSet's published models say, and its pods are the tasks that it names."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import yaml
from places import ROOT

from flowrt.cluster.cluster import ClusterSpec
from flowrt.cluster.worker_options import parse

MANIFEST = ROOT / "docs" / "deploy" / "jobset.yaml"


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load(MANIFEST.read_text())


@pytest.fixture(scope="module")
def models() -> Any:
    """What JobSet publishes."""
    # here: whoever collects tests would take a second for it
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    return JobsetV1alpha2JobSet


def pods(manifest: Any, job: str) -> Any:
    """The specification of a job's pods, and how many there are."""
    (found,) = [each for each in manifest["spec"]["replicatedJobs"] if each["name"] == job]
    spec = found["template"]["spec"]
    return spec["template"]["spec"], spec.get("completions", 1)


def environ_of(container: Any, index: int) -> dict[str, str]:
    """What a container's environment is in the pod of that index."""
    return {each["name"]: each.get("value", str(index)) for each in container["env"]}


def test_the_manifest_is_what_the_published_models_of_jobset_and_kubernetes_say(manifest: Any, models: Any) -> None:
    """They refuse a wrong type and a missing field; what they do not know would not come back from them."""
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert models.from_dict(manifest).to_dict() == manifest
    names = [job["name"] for job in manifest["spec"]["replicatedJobs"]]
    assert {*manifest["spec"]["successPolicy"]["targetReplicatedJobs"]} <= {*names}
    depends = [each for job in manifest["spec"]["replicatedJobs"] for each in job.get("dependsOn", ())]
    assert [each["name"] in names and each["status"] in ("Ready", "Complete") for each in depends] == [True]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicatedJobs", 0, "replicas"), "one"),
        (("spec", "replicatedJobs", 0, "template", "spec", "complections"), 1),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "livenessProb"), {}),
        (("spec", "successPolicy", "operator"), None),
    ],
)
def test_the_models_find_what_is_wrong(manifest: Any, models: Any, path: tuple[Any, ...], value: Any) -> None:
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        found = models.from_dict(manifest).to_dict()
    except ValueError:
        return
    assert found != manifest


def test_every_pod_is_the_task_that_its_name_says(manifest: Any) -> None:
    name, network = manifest["metadata"]["name"], manifest["spec"]["network"]
    assert network["enableDNSHostnames"]
    seen = {}
    for job in ("ps", "worker"):
        pod, many = pods(manifest, job)
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        given = parse(container["args"])
        assert (given.bind, given.health) == (f"0.0.0.0:{ports['flowrt']}", ("0.0.0.0", ports["health"]))
        assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} <= {*ports}
        for index in range(many):
            spec = ClusterSpec.from_env(environ_of(container, index))
            assert spec.task == f"/job:{job}/task:{index}"
            seen[spec.task] = f"{name}-{job}-0-{index}.{network['subdomain']}", ports["flowrt"]
    assert seen == spec.tasks()
    (client,) = pods(manifest, "client")[0]["containers"]
    assert ClusterSpec.from_env(environ_of(client, 0)) == spec


def test_every_pod_has_the_keys(manifest: Any) -> None:
    for (pod, _), kind in product([pods(manifest, job) for job in ("ps", "worker", "client")], ("env", "volumeMounts")):
        (container,) = pod["containers"]
        assert kind in container
        assert environ_of(container, 0)["FLOWRT_TLS"] == container["volumeMounts"][0]["mountPath"]
        assert pod["volumes"][0]["secret"]["defaultMode"] == 0o400
