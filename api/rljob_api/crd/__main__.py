"""``python -m rljob_api.crd [FILE]``: writes the CRD (default crds/rljob.yaml; - for standard output)."""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_api.crd import rendered


def main(arguments: list[str]) -> int:
    target = arguments[0] if arguments else "crds/rljob.yaml"
    if target == "-":
        sys.stdout.write(rendered())
        return 0
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rendered(), encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
