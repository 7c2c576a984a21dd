"""`python tests/integration/prepare.py`: builds once what the operator's tests run (Kubernetes, KubeRay, Helm, etcd).

Takes about ten minutes on two cores the first time and nothing afterwards. Tests never build; they say what is missing.
"""

from __future__ import annotations

import sys

from kube.programs import ProgramMissingError, find


def main() -> int:
    try:
        programs = find(build=True, helm="--without-helm" not in sys.argv, say=lambda line: print(line, flush=True))
    except ProgramMissingError as problem:
        print(f"prepare: {problem}", file=sys.stderr)
        return 1
    for name, path in sorted(programs.paths.items()):
        print(f"{name:26}{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
