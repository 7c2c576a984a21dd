"""The pins in requirements/: all have hashes, and they are all that an installation takes. Asks the package index."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest
from requirements import install, owners
from requirements.lock import PYTHONS, pins

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UV = Path(sys.executable).with_name("uv")


def pinned(name: str) -> dict[str, tuple[str, list[str]]]:
    return pins((REQUIREMENTS / name).read_text())


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Those of the index; a wheel folder of this machine isn't looked into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PIP_FIND_LINKS", raising=False)
        patch.setattr(install, "PYTHON", sys.executable)
        return install.index_settings()


def new_environment(folder: Path) -> Path:
    """The interpreter of an environment with nothing in it."""
    venv.create(folder / "environment", symlinks=True)
    return folder / "environment" / "bin" / "python"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of one in which nothing is installed."""
    return new_environment(tmp_path_factory.mktemp("empty"))


def uv(settings: dict[str, str], environment: Path, *arguments: str | Path) -> str:
    command = [UV, "pip", "install", "--python", environment, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt", "torch.txt", "build.txt", "uv.txt"])
def test_every_pin_has_hashes(name: str) -> None:
    without = {package for package, (_, hashes) in pinned(name).items() if not hashes}
    assert without == ({"torch"} if name in ("cpu.txt", "gpu.txt") else set())
    # Counted another way, so that no pin is passed over.
    assert len(pinned(name)) == len(re.findall("^[a-z0-9]", (REQUIREMENTS / name).read_text(), flags=re.MULTILINE))


def test_torch_is_one_version_everywhere() -> None:
    (wanted,) = (need for need in PROJECT["project"]["optional-dependencies"]["trainer"] if need.startswith("torch=="))
    files = ("cpu.txt", "gpu.txt", "torch.txt")
    assert {f"torch=={pinned(name)['torch'][0]}" for name in files} == {wanted}


def test_the_build_back_end_is_pinned_as_pyproject_says() -> None:
    for need in PROJECT["build-system"]["requires"]:
        name, version = need.split("==")
        assert pinned("build.txt")[name][0] == version


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("cpu.txt", ["operator"]),
        ("cpu.txt", ["trainer", "cpu", "operator", "dev"]),
        ("gpu.txt", ["trainer", "gpu", "operator", "dev"]),
    ],
    ids=["the operator", "for CPUs, to develop on", "for GPUs, to develop on"],
)
def test_whatever_is_needed_has_a_hash_and_a_wheel(
    settings: dict[str, str], empty: Path, python: str, file: str, extras: list[str]
) -> None:
    """As the Dockerfile and the installer say it, but that nothing is downloaded, and no such Python has to be here.
    What an image for GPUs has, which is nothing to develop on, is among the last."""
    overrides = ["--overrides", REQUIREMENTS / "cpu-overrides.txt"] if "cpu" in extras else []
    hashed = ["--constraints", REQUIREMENTS / file, "--constraints", REQUIREMENTS / "torch.txt", "--require-hashes"]
    wanted = ["--requirement", "pyproject.toml", *(f"--extra={extra}" for extra in extras), "--python-version", python]
    said = uv(settings, empty, "--dry-run", "--no-build", *overrides, *hashed, *wanted)
    taken = dict(re.findall(r"^ \+ (\S+)==(\S+)", said, flags=re.MULTILINE))
    known = pinned(file)
    assert "pydantic" in taken
    assert taken == {name: known[name][0] for name in taken}


@pytest.mark.parametrize("editable", [[], ["--editable"]], ids=["wheel", "checkout"])
def test_the_project_is_built_with_hashed_packages_alone(
    settings: dict[str, str], tmp_path: Path, editable: list[str]
) -> None:
    environment = new_environment(tmp_path)
    built = ["--build-constraints", REQUIREMENTS / "build.txt", "--require-build-hashes"]
    uv(settings, environment, "--no-deps", "--no-cache", *built, *editable, str(ROOT))
    asking = "from importlib.metadata import version; print(version('rljob'))"
    assert subprocess.check_output([environment, "-c", asking], text=True).strip() == PROJECT["project"]["version"]


def test_no_two_packages_bring_a_file_with_different_contents() -> None:
    assert owners.shared(distributions()) == {}


def test_no_two_packages_for_gpus_bring_a_file_with_different_contents() -> None:
    record = json.loads(owners.RECORD.read_text())
    assert record["pins"] == owners.pinned(), "gpu.txt has changed since: .venv/bin/python requirements/owners.py"
    # What building each of the two takes, in the wrong place; nothing imports it.
    assert record["shared"] == {"build_backend.py": ["flashinfer-python", "torch_c_dlpack_ext"]}


def test_a_file_that_two_packages_bring_is_found(tmp_path: Path) -> None:
    for name, digest in (("one", "a"), ("two", "b"), ("alike", "b")):
        about = tmp_path / f"{name}-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (about / "RECORD").write_text(
            f"both.py,sha256={digest},1\n{name}.py,sha256={digest},1\n{about.name}/RECORD,,\n"
        )
    assert owners.shared(distributions(path=[str(tmp_path)])) == {"both.py": ["alike", "one", "two"]}
    (tmp_path / "one-1.dist-info" / "RECORD").unlink()
    assert owners.shared(distributions(path=[str(tmp_path)])) == {}


def test_the_pins_are_for_the_pythons_that_are_tested() -> None:
    (tested,) = re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert sorted(tested.split()) == sorted(PYTHONS)
    lowest, above = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"]).groups()  # type: ignore[union-attr]
    assert sorted(PYTHONS) == [f"3.{minor}" for minor in range(int(lowest), int(above))]
