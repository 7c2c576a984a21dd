"""Which weights a model's folder has, in a few characters."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from rljob_trainer.errors import JobFileError

_BLOCK_BYTES = 1 << 16
_BLOCKS = 16
"""Looked at in each file of weights behind its header, the first and the last of its numbers among them: two trainings
of one network differ nearly everywhere."""
_READ_WHOLE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def version_of(folder: Path) -> str:
    """16 hexadecimal digits: a digest of configuration, tokenizer, and of header, size and some blocks of each file of
    weights. Raises ``JobFileError`` for a folder without weights or one that cannot be read."""
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise JobFileError(f"{folder} has no *.safetensors; use a Hugging Face model folder")
    try:
        for name in _READ_WHOLE:
            if (file := folder / name).exists():
                digest.update(f"{name}\0".encode() + file.read_bytes())
        for file in weights:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _add_weights(digest, file)
    except OSError as error:
        raise JobFileError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error
    return digest.hexdigest()[:16]


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header = min(struct.unpack("<Q", start)[0], size) if len(start) == 8 else 0
        digest.update(start + file.read(header))
        begin = 8 + header
        for block in range(_BLOCKS):
            file.seek(begin + max(0, size - begin - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
