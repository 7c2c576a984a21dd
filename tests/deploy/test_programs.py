"""Which programs are used: `KUBEBUILDER_ASSETS`, then the cache; and what is said when one is in neither."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testcluster import programs
from testcluster.programs import HELM, KUBERAY, KUBERNETES, OTHER_API_SERVERS, GoProgram, ProgramMissingError, find

ENVTEST = ("kube-apiserver", "etcd", "kubectl")
"""What `setup-envtest` puts into its folder: no controllers, and nothing of KubeRay's or Helm's."""
PREPARE = "run `make programs` once (20 minutes on two cores; needs Go 1.26 and Debian's packages)"


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """envtest's folder, in use. The cache is empty."""
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ENVTEST:
        (folder / name).touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    monkeypatch.setenv("RLJOB_TEST_CACHE", str(tmp_path / "cache"))
    return folder


def build(*built: GoProgram) -> None:
    """Leaves in the cache what building these does."""
    for program in built:
        folder = programs.cache_folder() / f"{program.name}-{programs._fingerprint(program)}"
        (folder / "bin").mkdir(parents=True)
        for link in program.links:
            (folder / "bin" / link).touch()
        if program.manifests_of:
            (folder / "crds").mkdir()
            (folder / "crds" / "ray.io_rayclusters.yaml").touch()


def where(found: programs.Programs, assets: Path) -> dict[str, str]:
    return {name: "assets" if path.parent == assets else "cache" for name, path in found.paths.items()}


def test_envtests_programs_are_used_and_the_rest_must_be_built(assets: Path) -> None:
    build(KUBERNETES, KUBERAY)
    found = find(build=False)
    assert all(path.exists() for path in found.paths.values())
    assert where(found, assets) == {
        "kube-apiserver": "assets",
        "etcd": "assets",
        "kubectl": "assets",
        "kube-controller-manager": "cache",
        "kube-scheduler": "cache",
        "kubelet": "cache",
        "kube-proxy": "cache",
        "ray-operator": "cache",
    }
    assert [path.name for path in found.crds] == ["ray.io_rayclusters.yaml"]


def test_with_the_controllers_beside_them_kubernetes_need_not_be_built(assets: Path) -> None:
    (assets / "kube-controller-manager").touch()
    build(KUBERAY)
    assert where(find(build=False), assets) == {
        **dict.fromkeys((*ENVTEST, "kube-controller-manager"), "assets"),
        "ray-operator": "cache",
    }
    with pytest.raises(ProgramMissingError, match=r"^kubernetes isn't built yet: "):
        find(build=False, cluster=True)  # nodes need more


@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_the_api_server_of_another_version_is_never_the_folders(assets: Path, age: str) -> None:
    build(KUBERNETES, KUBERAY)
    with pytest.raises(ProgramMissingError, match=rf"^kubernetes-{age} isn't built yet: "):
        find(build=False, api_server=age)
    build(OTHER_API_SERVERS[age])
    found = find(build=False, api_server=age)
    assert found.path("kube-apiserver").resolve().is_relative_to(programs.cache_folder())
    assert age in str(found.path("kube-apiserver"))
    assert found.path("kubectl").parent == assets


@pytest.mark.parametrize(
    ("built", "missing", "helm"),
    [
        pytest.param((), "kubernetes", False, id="envtest has no controllers"),
        pytest.param((KUBERNETES,), "kuberay", False, id="nor KubeRay"),
        pytest.param((KUBERNETES, KUBERAY), "helm", True, id="nor Helm"),
    ],
)
def test_what_is_missing_is_named_with_what_helps(
    assets: Path, built: tuple[GoProgram, ...], missing: str, helm: bool
) -> None:
    build(*built)
    with pytest.raises(ProgramMissingError) as caught:
        find(build=False, helm=helm)
    # The folder is set already, and never has it.
    assert str(caught.value) == f"{missing} isn't built yet: {PREPARE}"


def test_without_go_nothing_is_built_and_nothing_is_left(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(KUBERAY)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ProgramMissingError) as caught:
        find(build=True, helm=True)
    assert str(caught.value) == "kubernetes must be built and Go 1.26 isn't installed: install Go"
    build(KUBERNETES)
    with pytest.raises(ProgramMissingError, match=r"^helm must be built"):
        find(build=True, helm=True)
    assert not list(programs.cache_folder().glob(f"{HELM.name}-*/"))


def test_a_folder_that_is_not_there_is_as_if_it_were_not_set(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(KUBERNETES, KUBERAY)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    found = find(build=False)
    assert (str(found.path("etcd")), set(where(found, assets).values())) == ("/usr/bin/etcd", {"cache"})
