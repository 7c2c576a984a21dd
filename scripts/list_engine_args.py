"""Writes api/rljob_api/engine_args.txt: the names of vLLM's EngineArgs. Run it after a change of vLLM's version.

python scripts/list_engine_args.py > api/rljob_api/engine_args.txt
"""

import dataclasses

from vllm.engine.arg_utils import EngineArgs


def names() -> list[str]:
    """Public names, sorted."""
    return sorted(f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_"))


if __name__ == "__main__":
    print("\n".join(names()))
