"""Prints the names of vLLM's EngineArgs, for api/rljob_api/engine_args.txt. Run it after a change of vLLM's version.

    python scripts/list_engine_args.py > api/rljob_api/engine_args.txt

The class is read, not imported: that takes no ten seconds, and works where vLLM is installed but cannot run.
"""

import ast
from importlib.util import find_spec
from pathlib import Path


def engine_arg_names() -> list[str]:
    """Public fields of the dataclass, sorted."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed here")
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    (fields,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    names = (n.target.id for n in fields.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    return sorted(name for name in names if not name.startswith("_"))


if __name__ == "__main__":
    print("\n".join(engine_arg_names()))
