"""Writes what a pod may hold, by Kubernetes' own published schema, into ``rljob_api/pod_template/fields.json``.

    kubectl get --raw /openapi/v3/api/v1 | python scripts/pod_fields.py

Kept are names, types, allowed values, required fields and keys of lists; a test compares the file with what the API
server of the tests serves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rljob_api.pod_template.fields import FILE, compact


def rendered(document: dict[str, object]) -> str:
    """The file's text, one type a line."""
    types = compact(document)
    lines = [f" {json.dumps(name)}: {json.dumps(fields)}" for name, fields in sorted(types.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    Path(FILE).write_text(rendered(json.load(sys.stdin)))
