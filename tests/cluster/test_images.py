"""The operator's image, built from the Dockerfile on a base of Debian packages: what is in it, and that it runs."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from testcluster.addons import OPERATOR, OPERATOR_NAMESPACE, Kubectl
from testcluster.building import project_image

pytestmark = pytest.mark.timeout(600)
MEGABYTES = 1_000_000


@pytest.fixture(scope="module")
def archive() -> Path:
    return project_image("operator", say=print)


def config_of(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as image:
        (manifest,) = json.load(image.extractfile("manifest.json"))  # type: ignore[arg-type]
        config: dict[str, Any] = json.load(image.extractfile(manifest["Config"]))  # type: ignore[arg-type]
    return config


def test_the_operators_image_is_small_and_not_roots(archive: Path) -> None:
    assert archive.stat().st_size < 200 * MEGABYTES
    config = config_of(archive)["config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python", "-m", "rljob_operator"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_nothing_of_the_machine_it_was_built_on_is_in_the_image(archive: Path) -> None:
    variables = {entry.partition("=")[0] for entry in config_of(archive)["config"]["Env"]}
    assert variables == {"PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}


def test_the_image_carries_its_bill_of_materials_and_no_trainer(kubectl: Kubectl) -> None:
    def read(*command: str) -> str:
        return kubectl("exec", "--namespace", OPERATOR_NAMESPACE, f"deployment/{OPERATOR}", "--", *command)

    bill = json.loads(read("cat", "/opt/rljob/sbom.spdx.json"))
    assert bill["spdxVersion"] == "SPDX-2.3"
    packages = {package["name"] for package in bill["packages"]}
    assert {"rljob", "kopf", "aiohttp", "pydantic"} <= packages
    assert not packages & {"torch", "ray", "transformers", "vllm", "kubernetes", "pip"}
    assert "rljob_trainer" not in read("ls", "/opt/rljob/lib/python3.11/site-packages")
