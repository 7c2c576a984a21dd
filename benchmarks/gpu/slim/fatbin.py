"""Device code in ELF files, and what of it one GPU needs.

Sections ``.nv_fatbin`` and ``__nv_relfatbin`` hold containers: a header of 16 bytes (magic, version, its own size, how
much follows), then entries, each a header of 64 bytes or more and a payload. All is little-endian. NVIDIA publishes
no description; what is read here is what ``cuobjdump`` lists, and all that is not known is refused.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow

ELF = b"\x7fELF"
MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
ZSTD = 0x8000
"""A flag of entries whose payload is compressed."""
LINKABLE = "__nv_relfatbin"
"""Code for a linker. What it was linked to stands in ``.nv_fatbin``."""
NOTHING, NOWHERE = 0, 8
"""Types of sections that have no bytes in the file."""
LOADED = 2
"""A flag of sections that a process maps."""

Buffer = bytearray | mmap.mmap
_NOT_ZERO = re.compile(rb"[^\0]")


class UnknownContainerError(ValueError):
    """The file holds device code in a form that is not known. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Section:
    """One of an ELF file, in bytes from its beginning."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a container, in bytes from the beginning of the file."""

    offset: int
    header: int
    payload: int
    """With padding."""
    kind: int
    architecture: int
    """Ten times the compute capability."""
    flags: int
    compressed: int
    raw: int
    """The payload's bytes after decompression."""

    def bytes_of(self, data: Buffer) -> bytes:
        return bytes(data[self.offset : self.offset + self.header + self.payload])


@dataclass(frozen=True, slots=True)
class Container:
    """Images of the same code for several GPUs; the driver takes the one that fits."""

    start: int
    """Where its entries begin."""
    end: int
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Pruned:
    """Bytes of images kept and left out, and containers that have none for the capability (of these: with PTX, which a
    driver would have compiled), or had one that was left out by name."""

    kept: int = 0
    dropped: int = 0
    without: int = 0
    only_ptx: int = 0
    by_name: int = 0


def sections(data: Buffer) -> list[Section]:
    """Raises ``UnknownContainerError`` unless it is a 64-bit little-endian ELF file."""
    if data[:6] != ELF + b"\x02\x01":
        raise UnknownContainerError("no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    width, number, names = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, table + i * width) for i in range(number)]
    found = []
    for name, kind, flags, _, offset, size in rows:
        begin = rows[names][4] + name
        found.append(Section(bytes(data[begin : data.find(b"\0", begin)]).decode(), kind, flags, offset, size))
    return found


def containers(data: Buffer, section: Section) -> Iterator[Container]:
    """Raises ``UnknownContainerError`` at what is neither a container nor zeros between two."""
    at, end = section.offset, section.offset + section.size
    while found := _NOT_ZERO.search(data, at, end):
        # Containers begin at multiples of 8.
        at += (found.start() - at) // 8 * 8
        if at + 16 > end:
            raise UnknownContainerError(f"{section.name}: no known container at byte {at - section.offset}")
        magic, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC or version != 1 or header != 16 or at + header + size > end:
            raise UnknownContainerError(f"{section.name}: no known container at byte {at - section.offset}")
        start, at = at + header, at + header + size
        entries, inside = [], start
        while inside < at:
            entry = _entry(data, inside) if inside + 64 <= at else None
            if entry is None or inside + entry.header + entry.payload > at:
                raise UnknownContainerError(f"{section.name}: no known image at byte {inside - section.offset}")
            entries.append(entry)
            inside += entry.header + entry.payload
        yield Container(start, at, tuple(entries))


def _entry(data: Buffer, at: int) -> Entry | None:
    kind, _, header, payload, compressed = struct.unpack_from("<HHIQI", data, at)
    (architecture,) = struct.unpack_from("<I", data, at + 28)
    flags, _, raw = struct.unpack_from("<QQQ", data, at + 40)
    return Entry(at, header, payload, kind, architecture, flags, compressed, raw) if header >= 64 else None


def device_sections(data: Buffer) -> list[Section]:
    return [section for section in sections(data) if section.name in (".nv_fatbin", LINKABLE) and section.size]


def fits(entry: Entry, architecture: int) -> bool:
    """Whether such a GPU can run it as it is: of the same generation, and not for a later GPU of it."""
    same = entry.architecture // 10 == architecture // 10
    return entry.kind == CUBIN and same and entry.architecture <= architecture


def smallest_foreign(data: Buffer, architecture: int) -> bytes | None:
    """The smallest image for another generation of GPUs, which stands in where a container would have none."""
    found = [
        entry
        for section in device_sections(data)
        for container in containers(data, section)
        for entry in container.entries
        if entry.kind == CUBIN and entry.architecture // 10 != architecture // 10
    ]
    return min(found, key=lambda entry: entry.header + entry.payload).bytes_of(data) if found else None


def kernels(data: Buffer, entry: Entry) -> list[str]:
    """The mangled names of a cubin's kernels; none where its compression is not known."""
    begin = entry.offset + entry.header
    if entry.flags & ZSTD:
        image = pyarrow.decompress(data[begin : begin + entry.compressed], entry.raw, codec="zstd", asbytes=True)
    else:
        image = data[begin : begin + entry.payload]
    return sorted({name.decode() for name in re.findall(rb"\.text\.(_Z[A-Za-z0-9_$]+)", image)})


def prune(data: Buffer, architecture: int, left_out: re.Pattern[str] | None, stand_in: bytes | None) -> Pruned:
    """Leaves in ``data`` the images that such a GPU runs, at the front of their containers, whose sizes shrink; zeros
    follow. Sections keep their offsets and sizes; those that no process maps (symbols, debugging) become zeros.

    ``left_out``: containers all of whose kernels' names it finds are emptied. A container without an image holds
    ``stand_in``, an image for another GPU, so that the driver says that there is none for this one; without it, or room
    for it, such a container stays as it is. Raises ``UnknownContainerError``, with ``data`` as it was.
    """
    found = [(section, [*containers(data, section)]) for section in device_sections(data)]
    pruned = Pruned()
    for section, all_of_it in found:
        for container in all_of_it:
            keep = [entry for entry in container.entries if fits(entry, architecture) and section.name != LINKABLE]
            if left_out and keep:
                names = [name for entry in keep for name in kernels(data, entry)]
                if names and all(left_out.search(name) for name in names):
                    pruned.by_name += 1
                    keep = []
            elif not keep and section.name != LINKABLE:
                pruned.without += 1
                pruned.only_ptx += any(e.kind == PTX and e.architecture <= architecture for e in container.entries)
            body = b"".join(entry.bytes_of(data) for entry in keep) or stand_in or b""
            whole = container.end - container.start
            if not body or len(body) > whole:
                pruned.kept += whole
                continue
            data[container.start : container.end] = body + bytes(whole - len(body))
            struct.pack_into("<Q", data, container.start - 8, len(body))
            pruned.kept += len(body)
            pruned.dropped += whole - len(body)
    every = sections(data)
    (names_at,) = struct.unpack_from("<H", data, 62)
    for index, section in enumerate(every):
        if section.kind not in (NOTHING, NOWHERE) and not section.flags & LOADED and index != names_at:
            data[section.offset : section.offset + section.size] = bytes(section.size)
    return pruned
