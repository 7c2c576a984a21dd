"""`python sbom.py`: what is in an image, as SPDX 2.3 JSON on standard output: the Python packages of the environment it
runs in, and Debian's.

Runs while an image is built, inside it, with nothing but the standard library. A base that wasn't made with dpkg has no
list of packages that could be read here; then those of Python are all that is listed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")


def main() -> None:
    # Of two with the same name the first on the path is the one that is imported.
    found = {package["name"]: package for package in reversed([*map(_of_python, distributions())])}
    packages = sorted(found.values(), key=lambda package: str(package["name"]))
    if DPKG_STATUS.exists():
        packages += sorted(of_debian(DPKG_STATUS.read_text()), key=lambda package: str(package["name"]))
    digest = hashlib.sha256(json.dumps(packages).encode()).hexdigest()
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "rljob",
        "documentNamespace": f"https://rljob.dev/sbom/{digest}",
        # Fixed, so that the same packages make the same image.
        "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": ["Tool: rljob-sbom"]},
        "packages": packages,
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": package["SPDXID"],
            }
            for package in packages
        ],
    }
    json.dump(document, sys.stdout, indent=1)


def of_debian(status: str) -> Iterator[dict[str, object]]:
    """The installed packages among those that dpkg's status file tells of."""
    for paragraph in status.split("\n\n"):
        # Lines that go on the one before begin with a space.
        fields = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, flags=re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            # SPDX identifiers have no plus sign, names like libstdc++6 do.
            identifier = f"deb-{name.replace('+', '.')}"
            yield _package(identifier, name, version, f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}")


def _of_python(item: Distribution) -> dict[str, object]:
    name = re.sub(r"[-_.]+", "-", item.metadata["Name"]).lower()
    license_declared = item.metadata.get("License-Expression") or "NOASSERTION"
    return _package(name, name, item.version, f"pkg:pypi/{name}@{item.version}", license_declared)


def _package(
    identifier: str, name: str, version: str, purl: str, license_declared: str = "NOASSERTION"
) -> dict[str, object]:
    return {
        "SPDXID": f"SPDXRef-{identifier}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseDeclared": license_declared,
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}],
    }


if __name__ == "__main__":
    main()
