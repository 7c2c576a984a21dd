"""The check for GPUs in a pod of the trainer's image, as docs/real-cluster.md has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from benchmarks.environments import ROOT


def test_what_the_page_carries_into_a_pod_is_all_that_a_part_there_needs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "real-cluster.md").read_text()
    (carried,) = re.findall(r"^(git archive HEAD .*) \| kubectl exec -i gpu-check -- tar -x$", page, re.MULTILINE)
    pod = tmp_path / "pod"
    pod.mkdir()
    archive = subprocess.run(carried.split(), cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=pod, input=archive, check=True)
    check = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--only", "killed"]
    # As the image has the project installed, this environment has; from elsewhere it must import nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)}
    done = subprocess.run(check, cwd=pod, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "| from the engine's death to the learner's error (gloo) | killed |"
        in (pod / "benchmarks" / "gpu" / "results" / "gpu_on_cpu.md").read_text()
    )


def test_where_gpu_nodes_are_tainted_every_pod_with_gpus_says_so() -> None:
    page = (ROOT / "docs" / "real-cluster.md").read_text().partition("## What a job says")[2]
    spec = yaml.safe_load(page.split("```yaml\n", 1)[1].split("```", 1)[0])["spec"]
    pools = [pool for pool in spec.values() if isinstance(pool, dict) and "gpusPerReplica" in pool]
    assert len(pools) == 2
    for pool in pools:
        assert pool["pod"]["nodeSelector"] == {"gpu": "h100"}
        assert pool["pod"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    # What is only to be uncommented in the check's pod is valid there.
    text = (ROOT / "examples" / "cluster" / "gpu-check.yaml").read_text()
    uncommented = yaml.safe_load(re.sub(r"^  # (\w+: )", r"  \1", text, flags=re.MULTILINE))["spec"]
    assert uncommented["tolerations"] == pools[0]["pod"]["tolerations"]
    assert uncommented["nodeSelector"].keys() == {"nvidia.com/gpu.product"}
    assert uncommented["runtimeClassName"] == "nvidia"


def test_the_pod_of_the_check_is_admitted_where_jobs_are_and_has_a_gpu() -> None:
    """By the rules of Kubernetes' `restricted` level (pod-security-standards)."""
    pod = yaml.safe_load((ROOT / "examples" / "cluster" / "gpu-check.yaml").read_text())["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    # NCCL and what is handed over between processes need more than the 64 MB of a container.
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/check", "/dev/shm"}
    assert container["workingDir"] == "/check"
