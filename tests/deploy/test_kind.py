"""`deploy/kind/up.sh`: what it does, in which order, and what it says.

The script is the real one. docker, kind, kubectl and helm are shell scripts that record how they are called: no Docker
runs where these tests do, so whether the commands do what they should is for `make e2e` on a machine with Docker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from testcluster.building import VERSION

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "kind" / "up.sh"
LAPTOP = ROOT / "docs" / "laptop.md"
PROGRAMS = ("docker", "kind", "kubectl", "helm")
TOOLS = ("bash", "cat", "chmod", "dirname", "grep", "mkdir", "sed")
"""What the script uses beside them."""
WORKERS = ["rljob-worker", "rljob-worker2", "rljob-worker3"]
"""Kind's names for the workers of cluster.yaml."""
RECORDING = r"""#!{bash}
set -u
name=${{0##*/}}
echo "$name $*" >> "{folder}/calls"
case "$name $*" in
"docker info") [ -e "{folder}/docker-answers" ] ;;
"kind version") cat "{folder}/kind-version" ;;
"kind get clusters") cat "{folder}/clusters" ;;
"kind create cluster"*) cat > "{folder}/config.yaml"; echo rljob >> "{folder}/clusters" ;;
"kind get nodes"*) printf '%s\n' rljob-worker2 rljob-control-plane rljob-worker rljob-worker3 ;;
"kubectl config current-context") cat "{folder}/context" ;;
"kubectl get pv"*) echo shared3 ;;
esac
"""

Up = Callable[[], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with programs that record their calls, on a machine with Docker, without a cluster."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (binaries / tool).symlink_to(found)
    for program in PROGRAMS:
        path = binaries / program
        path.write_text(RECORDING.format(bash=shutil.which("bash"), folder=tmp_path))
        path.chmod(0o755)
    (tmp_path / "docker-answers").touch()
    (tmp_path / "kind-version").write_text("kind v0.32.0 go1.26.3 linux/amd64\n")
    (tmp_path / "clusters").write_text("another\n")
    (tmp_path / "context").write_text("production\n")
    return tmp_path


@pytest.fixture
def up(machine: Path) -> Up:
    def run() -> subprocess.CompletedProcess[str]:
        (machine / "calls").write_text("")
        environment = {"PATH": str(machine / "bin"), "HOME": str(machine / "home")}
        return subprocess.run(
            [str(machine / "bin" / "bash"), str(SCRIPT)], env=environment, cwd="/", capture_output=True, text=True
        )

    return run


def calls(machine: Path) -> list[str]:
    return (machine / "calls").read_text().splitlines()


def assert_refused(machine: Path, done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The script ended with an error of one line that has these words, before it changed anything."""
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line
    assert set(calls(machine)) <= {"docker info", "kind version"}
    assert not (machine / "home").exists()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_is_missing_is_named_before_anything_is_built(machine: Path, up: Up, program: str) -> None:
    (machine / "bin" / program).unlink()
    assert_refused(machine, up(), f"not installed: {program} (")


def test_all_that_is_missing_is_named_at_once(machine: Path, up: Up) -> None:
    for program in ("kind", "helm"):
        (machine / "bin" / program).unlink()
    assert_refused(machine, up(), "not installed: kind helm (")


def test_an_engine_that_does_not_answer_is_named(machine: Path, up: Up) -> None:
    (machine / "docker-answers").unlink()
    assert_refused(machine, up(), "docker", "doesn't answer")


def test_a_kind_that_is_too_old_for_the_node_image_is_named(machine: Path, up: Up) -> None:
    (machine / "kind-version").write_text("kind v0.31.0 go1.25.1 linux/amd64\n")
    assert_refused(machine, up(), "kind v0.31.0", "0.32 or newer")


@pytest.mark.parametrize("version", ["v0.32.0", "v0.33.1", "v0.100.0", "v0.33.0-alpha+1a2b3c", "v1.0.0"])
def test_a_newer_kind_will_do(machine: Path, up: Up, version: str) -> None:
    (machine / "kind-version").write_text(f"kind {version} go1.26.3 linux/amd64\n")
    assert up().returncode == 0


def test_a_cluster_is_made_before_images_and_operators_are_brought_into_it(machine: Path, up: Up) -> None:
    done = up()
    assert done.returncode == 0, done.stderr
    order = [
        "kind create cluster",
        "docker build --target operator",
        "kind load docker-image",
        "docker build --target trainer",
        "kind load docker-image",
        "kubectl apply -f deploy/kind/volumes.yaml",
        "kubectl patch pv shared3",
        "kubectl patch node",
        "helm upgrade --install kuberay-operator",
        "helm upgrade --install rljob-operator",
        "kubectl rollout restart",
        "kubectl rollout status",
    ]
    left = iter(calls(machine))
    for begin in order:
        assert any(call.startswith(begin) for call in left), f"`{begin}` was not called, or too early"
    folders = {mount["hostPath"] for node in nodes(machine) for mount in node["extraMounts"]}
    assert folders == {str(machine / "home/.cache/rljob/kind")}
    assert sorted(os.listdir(folders.pop())) == ["volume1", "volume2", "volume3", "volume4"]


def nodes(machine: Path) -> list[dict[str, list[dict[str, str]]]]:
    """The nodes that kind was asked for."""
    found: list[dict[str, list[dict[str, str]]]] = yaml.safe_load((machine / "config.yaml").read_text())["nodes"]
    return found


def test_images_and_gpus_are_the_workers(machine: Path, up: Up) -> None:
    up()
    asked = [node["role"] for node in yaml.safe_load((ROOT / "deploy/kind/cluster.yaml").read_text())["nodes"]]
    assert asked.count("worker") == len(WORKERS)
    loaded = [call.split() for call in calls(machine) if call.startswith("kind load docker-image ")]
    assert [words[-1] for words in loaded] == [f"rljob/operator:{VERSION}", f"rljob/trainer:{VERSION}"]
    for words in loaded:
        assert sorted(words[words.index("--nodes") + 1].split(",")) == WORKERS
    patched = [call.split()[3] for call in calls(machine) if call.startswith("kubectl patch node ")]
    assert sorted(patched) == WORKERS


def test_a_cluster_that_is_there_is_kept_and_brought_up_to_date(machine: Path, up: Up) -> None:
    up()
    first = calls(machine)
    (machine / "context").write_text("kind-rljob\n")
    again = up()
    assert again.returncode == 0, again.stderr
    create = "kind create cluster --config - --wait 120s"
    assert create in first
    # kubectl may have forgotten the cluster, or look at another one.
    renewed = ["kind export kubeconfig --name rljob" if call == create else call for call in first]
    assert calls(machine) == renewed


def test_the_change_of_context_is_told_with_the_way_back(machine: Path, up: Up) -> None:
    assert "kind-rljob now; back to the one before: kubectl config use-context production\n" in up().stdout
    (machine / "context").write_text("kind-rljob\n")
    assert "back to" not in up().stdout


def test_the_commands_that_come_next_are_those_of_the_laptop_page(up: Up) -> None:
    printed = [line.strip() for line in up().stdout.splitlines() if line.startswith("  kubectl ")]
    page = LAPTOP.read_text().splitlines()
    assert len(printed) == 3
    assert [line for line in page if line in printed] == printed
