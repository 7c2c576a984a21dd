"""Which programs are used: `KUBEBUILDER_ASSETS`, then the cache; and what is said when one is in neither."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testcluster import commands, programs
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


FAKE_GO = "#!/bin/sh\necho go1.{minor}.3\n"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing is built yet: what is on its path, and its release."""
    monkeypatch.setenv("RLJOB_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setattr(programs, "OS_RELEASE", tmp_path / "os-release")
    monkeypatch.setattr(
        programs.shutil, "which", lambda name, path=None: str(found) if (found := tmp_path / name).exists() else None
    )
    program(tmp_path / "go", FAKE_GO.format(minor=26))
    program(tmp_path / "apt-get", "#!/bin/sh\n")
    (tmp_path / "os-release").write_text('PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n')
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_a_machine_that_can_build_says_with_what(bare: Path) -> None:
    assert programs.check_that_they_can_be_made() == "go1.26.3, Debian 12: programs can be built"


def test_what_is_missing_for_a_build_is_said_before_it(bare: Path) -> None:
    (bare / "os-release").write_text("ID=alpine\nVERSION_ID=3.20\n")
    with pytest.raises(
        ProgramMissingError, match=r"come from Debian 12 or later with apt-get, and this is alpine 3.20"
    ):
        programs.check_that_they_can_be_made()
    program(bare / "go", FAKE_GO.format(minor=25))
    with pytest.raises(ProgramMissingError, match=r"built with Go 1.26, and .*go is go1.25.3: install that"):
        programs.check_that_they_can_be_made()
    (bare / "go").unlink()
    with pytest.raises(ProgramMissingError, match=r"Go 1\.26 isn't installed: install Go"):
        programs.check_that_they_can_be_made()


def test_what_the_network_refuses_is_asked_for_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "PAUSES", (0.0, 0.0))
    answers = tmp_path / "answers"
    asked = [
        "sh",
        "-c",
        f"echo x >> {answers}; [ $(wc -l < {answers}) -ge 3 ] || {{ echo refused >&2; exit 1; }}; echo here",
    ]
    assert commands.fetch(asked) == "here\n"
    assert capsys.readouterr().err.count("refused; once more in 0 s") == 2
    answers.unlink()
    with pytest.raises(commands.CommandFailedError, match="refused"):
        commands.fetch([*asked[:2], asked[2].replace("-ge 3", "-ge 4")])
