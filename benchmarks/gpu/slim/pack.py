"""From wheels to archives: files in a folder as they will be in site-packages, pruned; pieces of them, each compressed
by itself; archives, which are pieces one after the other. ``unpack.py`` says what a piece holds."""

from __future__ import annotations

import hashlib
import json
import lzma
import mmap
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.slim import fatbin
from benchmarks.gpu.slim.contents import KERNELS_LEFT_OUT, LEFT_OUT

PIECE = 64 << 20
"""Bytes that are compressed at a time, of which xz remembers all."""
_LEFT_OUT = {reason: re.compile(pattern) for reason, pattern in LEFT_OUT.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """Some bytes of a file."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A compressed file, whose name has the hash of what it holds."""

    path: Path
    size: int
    sha256: str


def extract(wheel: Path, site: Path) -> dict[str, int]:
    """A wheel's files into ``site``, without those that are left out: bytes of these by reason."""
    left_out = dict.fromkeys(_LEFT_OUT, 0)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            if why := next((reason for reason, files in _LEFT_OUT.items() if files.search(member.filename)), None):
                left_out[why] += member.file_size
                continue
            path = Path(archive.extract(member, site))
            path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)
    return left_out


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == fatbin.ELF


def stand_in(path: Path, architecture: int) -> bytes | None:
    """The smallest image of an ELF file that such a GPU refuses."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            return fatbin.smallest_foreign(data, architecture)
    except fatbin.UnknownContainerError:
        return None


def prune(site: Path, architecture: int, image: bytes | None, path: Path) -> fatbin.Pruned | str:
    """Prunes an ELF file where it is; or says why it is carried whole."""
    name = path.relative_to(site).as_posix()
    kernels = KERNELS_LEFT_OUT.get(name)
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            return fatbin.prune(data, architecture, re.compile(kernels) if kernels else None, image)
    except fatbin.UnknownContainerError as error:
        return f"{name}: {error}"


def blocks(site: Path, files: list[Path], size: int = PIECE) -> Iterator[list[Extent]]:
    """The files' bytes in blocks of at most ``size``; alike files come together, so that they compress well."""
    block: list[Extent] = []
    room = size
    for path in sorted(files, key=lambda path: (path.suffix, path.name, path)):
        total, offset = path.stat().st_size, 0
        while True:
            length = min(room, total - offset)
            block.append(Extent(path.relative_to(site).as_posix(), offset, length))
            offset, room = offset + length, room - length
            if not room:
                yield block
                block, room = [], size
            if offset >= total:
                break
    if block:
        yield block


def compress(site: Path, kept: Path, limit: int, job: tuple[list[Extent], bool]) -> list[Piece]:
    """A block as one piece, or as several where it is more than ``limit`` bytes; ``job`` says whether it is machine
    code. Pieces of an earlier run in ``kept`` are taken from there. Raises ``ValueError``: nothing is that small.
    """
    block, code = job
    head = []
    payload = bytearray()
    for extent in block:
        path = site / extent.path
        head.append([extent.path, path.stat().st_mode & 0o777, path.stat().st_size, extent.offset, extent.length])
        with path.open("rb") as file:
            file.seek(extent.offset)
            payload += file.read(extent.length)
    content = json.dumps(head).encode() + b"\n" + payload
    path = kept / f"{hashlib.sha256(content).hexdigest()}.xz"
    if not path.exists():
        filters: list[dict[str, int]] = [{"id": lzma.FILTER_X86}] if code else []
        filters.append({"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": PIECE})
        part = path.with_suffix(".part")
        part.write_bytes(lzma.compress(content, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters))
        part.rename(path)
    if path.stat().st_size <= limit:
        return [Piece(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())]
    if len(payload) < 2:
        raise ValueError(f"archives of {limit} bytes are too small")
    halves: list[list[Extent]] = [[], []]
    room = len(payload) // 2
    for extent in block:
        first = min(room, extent.length)
        room -= first
        if first or not extent.length:
            halves[0].append(Extent(extent.path, extent.offset, first))
        if extent.length > first:
            halves[1].append(Extent(extent.path, extent.offset + first, extent.length - first))
    return [piece for half in halves for piece in compress(site, kept, limit, (half, code))]


def shared_out(pieces: list[Piece], limit: int) -> list[list[Piece]]:
    """The pieces in as few archives of at most ``limit`` bytes as is found by giving each, the largest first, to the
    emptiest."""
    number = max(1, -(-sum(piece.size for piece in pieces) // limit))
    while True:
        archives: list[list[Piece]] = [[] for _ in range(number)]
        sizes = [0] * number
        for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.sha256)):
            emptiest = sizes.index(min(sizes))
            archives[emptiest].append(piece)
            sizes[emptiest] += piece.size
        if max(sizes) <= limit:
            return archives
        number += 1


def write(archives: list[list[Piece]], folder: Path, about: dict[str, object]) -> None:
    """Archives and their manifest into ``folder``, in place of those of an earlier run."""
    for old in folder.glob("slim-*"):
        old.unlink()
    listed = {}
    for number, pieces in enumerate(archives, 1):
        name = f"slim-{number}-of-{len(archives)}"
        with (folder / name).open("wb") as file:
            for piece in pieces:
                file.write(piece.path.read_bytes())
        listed[name] = [{"size": piece.size, "sha256": piece.sha256} for piece in pieces]
    (folder / "manifest.json").write_text(json.dumps(about | {"archives": listed}, indent=1))


def pack(site: Path, kept: Path, limit: int, pool: ProcessPoolExecutor) -> list[list[Piece]]:
    """All files of ``site`` in archives of at most ``limit`` bytes, compressed over the cores."""
    files = [path for path in site.rglob("*") if path.is_file()]
    code = [path for path in files if is_elf(path)]
    jobs = [(block, True) for block in blocks(site, code)]
    jobs += [(block, False) for block in blocks(site, sorted(set(files) - set(code)))]
    pieces = [piece for some in pool.map(partial(compress, site, kept, limit), jobs) for piece in some]
    return shared_out(pieces, limit)
