"""A peer's environment is made of wheels in a folder where there is no package index."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from benchmarks.environments import Peer, peer_python
from benchmarks.gpu.parts import PEER, peer_is_made

from benchmarks import environments


def wheel(folder: Path, name: str, text: str, requires: str = "") -> None:
    """A wheel of one module."""
    about = f"{name}-1.0.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": text,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as packed:
        for path, content in files.items():
            packed.writestr(path, content)


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, in the two variables that the page names; an index would be out of reach."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setitem(environments.PEERS, PEER, Peer(("rljobpeer==1.0",), constrained=False))
    return folder


def test_wheels_of_a_folder_are_all_that_it_takes(carried: Path, tmp_path: Path) -> None:
    wheel(carried, "rljobpeer", "from rljobneed import SAID\nprint(SAID)\n", "rljobneed==1.0")
    wheel(carried, "rljobneed", "SAID = 'from the folder'\n")
    python = peer_python(PEER, tmp_path)
    done = subprocess.run([python, "-c", "import rljobpeer"], capture_output=True, text=True, check=True)
    assert done.stdout == "from the folder\n"
    assert peer_is_made(tmp_path)


def test_what_the_folder_lacks_is_named_and_nothing_counts_as_made(
    carried: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel(carried, "rljobpeer", "", "rljobneed==1.0")
    with pytest.raises(subprocess.CalledProcessError):
        peer_python(PEER, tmp_path)
    assert "rljobneed" in capfd.readouterr().err
    assert not peer_is_made(tmp_path)
