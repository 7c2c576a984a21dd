"""The operator's image, built from the Dockerfile on a base of Debian packages: what is in it, and that it runs. Of the
trainer's for GPUs, which is too large to be built here, what Debian's packages bring to it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from requirements.lock import pins

from testcluster import debian
from testcluster.addons import OPERATOR, OPERATOR_NAMESPACE, Kubectl
from testcluster.building import LIBRARIES, ROOT, base_root, project_image
from testcluster.images import read_configuration

pytestmark = pytest.mark.timeout(600)
MEGABYTES = 1_000_000


@pytest.fixture(scope="module")
def archive() -> Path:
    return project_image("operator", say=print)


def test_the_operators_image_is_small_and_not_roots(archive: Path) -> None:
    assert archive.stat().st_size < 200 * MEGABYTES
    config = read_configuration(archive)["config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python", "-m", "rljob_operator"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (labels["version"], labels["licenses"]) == (project["version"], project["license"])
    # Nobody said which commit this is.
    assert labels["revision"] == ""


def test_nothing_of_the_machine_it_was_built_on_is_in_the_image(archive: Path) -> None:
    variables = {entry.partition("=")[0] for entry in read_configuration(archive)["config"]["Env"]}
    assert variables == {"PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}


def test_the_image_carries_its_bill_of_materials_and_no_trainer(kubectl: Kubectl) -> None:
    def read(*command: str) -> str:
        return kubectl("exec", "--namespace", OPERATOR_NAMESPACE, f"deployment/{OPERATOR}", "--", *command)

    bill = json.loads(read("cat", "/opt/rljob/sbom.spdx.json"))
    assert bill["spdxVersion"] == "SPDX-2.3"
    packages = {package["name"] for package in bill["packages"]}
    assert {"rljob", "kopf", "kubernetes", "aiohttp", "pydantic"} <= packages
    assert not packages & {"torch", "ray", "transformers", "vllm", "pip"}
    assert {"libc6", "python3.11"} <= packages  # the base's
    # Nothing came in but what has a hash.
    installed = {
        (package["name"], package["versionInfo"])
        for package in bill["packages"]
        if package["externalRefs"][0]["referenceLocator"].startswith("pkg:pypi/")
    }
    hashed = {
        (name, version)
        for name, (version, hashes) in pins((ROOT / "requirements/cpu.txt").read_text()).items()
        if hashes
    }
    assert {name for name, _ in installed - hashed} == {"rljob"}
    assert "rljob_trainer" not in read("ls", "/opt/rljob/lib/python3.11/site-packages")


def test_what_the_gpu_image_installs_for_nccl_has_the_libraries_and_they_load(tmp_path: Path) -> None:
    """Debian's release is that of the image's base; the image's Python and C library load them."""
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=\S*slim-bookworm@", text, flags=re.MULTILINE)
    assert "VERSION_CODENAME=bookworm" in (base_root() / "etc/os-release").read_text()
    (installed,) = re.findall(r'"\$\{ACCELERATOR\}" = gpu \]; then set -- (.*?); else', text)
    asked = [name for name in installed.split() if re.search("ibverbs|rdmacm", name)]
    controls = debian.unpack(asked, tmp_path)
    needed = set(re.findall(r"\b(libnl-[a-z0-9-]+)", "\n".join(controls)))
    debian.unpack(sorted(needed), tmp_path)
    folder = tmp_path / LIBRARIES
    # Mellanox's adapters, the usual ones, have their provider.
    assert list((folder / "libibverbs").glob("libmlx5-*.so"))
    loads = "import ctypes; ctypes.CDLL('libibverbs.so.1').ibv_get_device_list; ctypes.CDLL('librdmacm.so.1')"
    python = base_root() / "usr/bin/python3.11"
    loader = next((base_root() / "usr/lib64").glob("ld-linux-x86-64.so.2"))
    # Debian 12 has libnl's in /lib, which is /usr/lib there.
    paths = f"{folder}:{tmp_path / LIBRARIES.removeprefix('usr/')}:{base_root() / LIBRARIES}"
    environment = {"PYTHONHOME": str(base_root() / "usr"), "LD_LIBRARY_PATH": paths}
    command = [loader, "--library-path", paths, python, "-c", loads]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
