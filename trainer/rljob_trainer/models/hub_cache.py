"""Where files of the hub lie on this machine: the cache that huggingface_hub keeps, found without importing it.

``rljob validate`` looks there, which has neither a network nor time to import anything.
"""

from __future__ import annotations

import os
from pathlib import Path


def cached_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file of the model ``owner/name`` at a revision (branch, tag or commit; None: main); None: it is not there."""
    model = _folder() / f"models--{name.replace('/', '--')}"
    reference = model / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision or "main"
    path = model / "snapshots" / commit / file
    return path if path.is_file() else None


def _folder() -> Path:
    """The folder of the cache, settled as huggingface_hub does."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))
