"""The bill of materials that images carry: the real script, in an environment and with a dpkg status file made here."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "images" / "sbom.py"
STATUS = """\
Package: libstdc++6
Status: install ok installed
Architecture: amd64
Source: gcc-12
Version: 12.2.0-14+deb12u1
Description: GNU Standard C++ Library v3
 The line that says more is not a field:
 Version: 1
Homepage: http://gcc.gnu.org/

Package: gone
Status: deinstall ok config-files
Version: 3.0-1

Package: zlib1g
Version: 1:1.2.13.dfsg-1
Status: install ok installed

"""


@pytest.fixture
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bill(sbom: ModuleType, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Its packages by their addresses."""
    sbom.main()
    packages = json.loads(capsys.readouterr().out)["packages"]
    identifiers = [package["SPDXID"] for package in packages]
    assert len(set(identifiers)) == len(identifiers)
    return {package["externalRefs"][0]["referenceLocator"]: package for package in packages}


def test_debians_packages_are_listed_beside_those_of_python(
    sbom: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status"
    status.write_text(STATUS)
    monkeypatch.setattr(sbom, "DPKG_STATUS", status)
    packages = bill(sbom, capsys)
    assert f"pkg:pypi/pydantic@{version('pydantic')}" in packages
    assert {locator for locator in packages if locator.startswith("pkg:deb/")} == {
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1",
        "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1",
    }
    library = packages["pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1"]
    assert (library["name"], library["versionInfo"]) == ("libstdc++6", "12.2.0-14+deb12u1")
    # SPDX 2.3, clause 7.2: letters, digits, full stops and hyphens.
    assert library["SPDXID"] == "SPDXRef-deb-libstdc..6"


def test_without_dpkg_there_are_those_of_python_alone(
    sbom: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sbom, "DPKG_STATUS", tmp_path / "status")
    packages = bill(sbom, capsys)
    assert packages
    assert all(locator.startswith("pkg:pypi/") for locator in packages)


def test_a_second_copy_that_nobody_imports_is_not_listed(
    sbom: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "pydantic-0.1.dist-info"
    copy.mkdir()
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: Pydantic\nVersion: 0.1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    packages = bill(sbom, capsys)
    assert f"pkg:pypi/pydantic@{version('pydantic')}" in packages
    assert "pkg:pypi/pydantic@0.1" not in packages
