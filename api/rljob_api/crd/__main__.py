"""``python -m rljob_api.crd [FILE]``: writes the CRD (default: the checkout's two files; - for standard output)."""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_api.crd import rendered

# The chart has a file of its own: Helm packs links, but talks about them at every call.
FILES = ("crds/rljob.yaml", "charts/rljob-operator/files/rljob.yaml")


def main(arguments: list[str]) -> int:
    if arguments == ["-"]:
        sys.stdout.write(rendered())
        return 0
    for path in map(Path, arguments or FILES):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rendered(), encoding="utf-8")
        print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
