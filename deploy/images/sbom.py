"""`python sbom.py`: the Python packages of the environment it runs in, as SPDX 2.3 JSON on standard output.

Runs while an image is built, inside it, with nothing but the standard library. The base image's own packages are not
listed: whoever chose the base knows its bill.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from importlib.metadata import Distribution, distributions


def main() -> None:
    packages = sorted((_package(item) for item in distributions()), key=lambda package: str(package["name"]))
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


def _package(item: Distribution) -> dict[str, object]:
    name = re.sub(r"[-_.]+", "-", item.metadata["Name"]).lower()
    return {
        "SPDXID": f"SPDXRef-{name}",
        "name": name,
        "versionInfo": item.version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseDeclared": item.metadata.get("License-Expression") or "NOASSERTION",
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:pypi/{name}@{item.version}",
            }
        ],
    }


if __name__ == "__main__":
    main()
