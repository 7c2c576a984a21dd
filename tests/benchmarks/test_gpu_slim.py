"""What is carried to a GPU through a narrow channel: device code is pruned, archives are unpacked, and nothing wrong
is taken for right. Containers are built here from the format's description, field by field; NVIDIA's is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow
import pytest
from benchmarks.gpu.slim import check, fatbin, unpack
from benchmarks.gpu.slim.__main__ import architecture
from benchmarks.gpu.slim.contents import CARRIED, KERNELS_LEFT_OUT, LEFT_OUT
from benchmarks.gpu.slim.pack import blocks, is_elf, pack, prune, write
from benchmarks.gpu.wheels import entries

PTX, CUBIN = 1, 2


def image(kind: int, arch: int, content: bytes, compressed: bool = False, header: int = 64) -> bytes:
    """An entry: kind (2 bytes), version (2), header size (4), the payload's (8), compressed bytes (4), options (4),
    minor and major version (2 + 2), architecture (4), name (4 + 4), flags (8), nothing (8), raw bytes (8).
    """
    stored = pyarrow.compress(content, codec="zstd", asbytes=True) if compressed else content
    payload = stored + bytes(-len(stored) % 8)
    flags = 0x11 | (0x8000 if compressed else 0)
    head = struct.pack("<HHIQ", kind, 0x101, header, len(payload))
    head += struct.pack("<II", len(stored) if compressed else 0, 0) + struct.pack("<HHI", 7, 1, arch)
    head += struct.pack("<IIQQQ", 0, 0, flags, 0, len(content) if compressed else 0)
    return head + bytes(header - len(head)) + payload


def container(*images: bytes) -> bytes:
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(sections: dict[str, bytes], loaded: tuple[str, ...] = (".nv_fatbin", "__nv_relfatbin")) -> bytes:
    """A 64-bit ELF file of nothing but these sections; the first of its table is empty, the last has the names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    contents = {**sections, ".shstrtab": names}
    body, rows = b"", [bytes(64)]
    for name, content in contents.items():
        body += bytes(-len(body) % 16)
        where, flags = 64 + len(body), 2 if name in loaded else 0
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(struct.pack("<IIQQQQIIQQ", at, 1, flags, 0, where, len(content), 0, 0, 8, 0))
        body += content
    body += bytes(-len(body) % 8)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(rows), len(rows) - 1)
    return head + body + b"".join(rows)


def section(file: bytes | bytearray, content: dict[str, bytes], name: str) -> bytes:
    """Where ``elf`` has put it."""
    at = elf(content).index(content[name])
    return bytes(file[at : at + len(content[name])])


OLD = image(CUBIN, 75, b"old" * 9)
FITS = image(CUBIN, 90, b"this one, as it is: .text._Z6needed" * 20)
SMALL = image(CUBIN, 90, b"compressed: .text._Z6needed" * 50, compressed=True, header=72)
LATER = image(CUBIN, 100, b"later" * 100, compressed=True)
TEXT = image(PTX, 80, b".version 9.0 .target sm_80" * 3)
NEW_TEXT = image(PTX, 120, b".version 9.0 .target sm_120" * 3)
STAND_IN = OLD


def pruned(content: dict[str, bytes], left_out: str | None = None, arch: int = 90) -> tuple[bytearray, fatbin.Pruned]:
    data = bytearray(elf(content))
    return data, fatbin.prune(data, arch, re.compile(left_out) if left_out else None, STAND_IN)


def shrunk(whole: bytes, *images: bytes) -> bytes:
    """A container with these images, which takes the room of ``whole``."""
    return container(*images).ljust(len(whole), b"\0")


def test_images_for_the_gpu_stay_byte_for_byte_and_nothing_else() -> None:
    one, two = container(OLD, FITS, TEXT), container(LATER, SMALL, FITS, NEW_TEXT)
    content = {".text": b"code" * 9, ".nv_fatbin": one + bytes(24) + two, ".symtab": b"symbols!"}
    data, said = pruned(content)
    assert section(data, content, ".nv_fatbin") == shrunk(one, FITS) + bytes(24) + shrunk(two, SMALL, FITS)
    assert said.kept == 2 * len(FITS) + len(SMALL)
    assert said.dropped == len(OLD) + len(TEXT) + len(LATER) + len(NEW_TEXT)
    assert (said.without, said.only_ptx, said.by_name) == (0, 0, 0)


def test_what_no_process_maps_becomes_zeros_and_all_else_stays_where_it_is() -> None:
    content = {".text": b"code" * 9, ".nv_fatbin": container(FITS), ".symtab": b"symbols!"}
    before = elf(content, loaded=(".text", ".nv_fatbin"))
    data = bytearray(before)
    fatbin.prune(data, 90, None, STAND_IN)
    assert bytes(data) == before.replace(b"symbols!", bytes(8))


def test_a_container_without_an_image_for_the_gpu_has_one_for_another() -> None:
    one, two, three = container(LATER, TEXT), container(LATER, NEW_TEXT), container(FITS)
    content = {".nv_fatbin": one + two + three}
    data, said = pruned(content)
    assert section(data, content, ".nv_fatbin") == shrunk(one, STAND_IN) + shrunk(two, STAND_IN) + three
    assert (said.without, said.only_ptx) == (2, 1), "PTX for a later GPU is of no use to this one"


def test_a_container_without_room_for_another_image_stays() -> None:
    content = {".nv_fatbin": container(image(PTX, 80, b"short"))}
    assert pruned(content)[0] == elf(content)


def test_code_for_a_linker_is_left_out() -> None:
    content = {".nv_fatbin": container(FITS), "__nv_relfatbin": container(FITS, LATER)}
    data, said = pruned(content)
    assert section(data, content, ".nv_fatbin") == content[".nv_fatbin"]
    assert section(data, content, "__nv_relfatbin") == shrunk(content["__nv_relfatbin"], STAND_IN)
    assert said.without == 0


@pytest.mark.parametrize("compressed", [False, True])
def test_kernels_are_left_out_by_name_where_all_of_a_container_are(compressed: bool) -> None:
    half = image(CUBIN, 90, b"\0.text._Z4halfv\0.text._Z5half2v\0" * 9, compressed)
    mixed = image(CUBIN, 90, b"\0.text._Z4halfv\0.text._Z6neededv\0" * 9, compressed)
    nameless = image(CUBIN, 90, b"no kernel" * 40, compressed)
    content = {".nv_fatbin": container(half, OLD) + container(mixed) + container(nameless)}
    data, said = pruned(content, "half")
    assert section(data, content, ".nv_fatbin") == (
        shrunk(container(half, OLD), STAND_IN) + container(mixed) + container(nameless)
    )
    assert (said.by_name, said.without) == (1, 0)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (struct.pack("<IHHQ", 0xBA55ED51, 1, 16, 8) + bytes(8), "no known container"),
        (struct.pack("<IHHQ", 0xBA55ED50, 2, 16, 8) + bytes(8), "no known container"),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40) + bytes(8), "no known container"),
        (container(b"\1" * 24), "no known image"),
        (container(FITS, bytes(64)), "no known image"),
        (container(FITS[:-8]), "no known image"),
    ],
)
def test_an_unknown_form_is_refused_and_the_file_untouched(bad: bytes, why: str, tmp_path: Path) -> None:
    before = elf({".nv_fatbin": container(LATER, FITS) + bad, ".symtab": b"symbols!"})
    data = bytearray(before)
    with pytest.raises(fatbin.UnknownContainerError, match=why):
        fatbin.prune(data, 90, None, STAND_IN)
    assert data == before
    path = tmp_path / "lib.so"
    path.write_bytes(before)
    said = prune(tmp_path, 90, STAND_IN, path)
    assert isinstance(said, str)
    assert said.startswith("lib.so: .nv_fatbin: ")
    assert path.read_bytes() == before


def test_what_a_gpu_runs() -> None:
    def kept(arch: int, *of: int) -> list[int]:
        images = {one: image(CUBIN, one, b"%d" % one * 40) for one in of}
        content = {".nv_fatbin": container(*images.values())}
        data = section(pruned(content, arch=arch)[0], content, ".nv_fatbin")
        return [one for one, its in images.items() if its in data]

    # Binaries run on GPUs of the same major version with the same or a larger minor version (CUDA's guide).
    assert kept(90, 75, 80, 86, 90, 100) == [90]
    assert kept(86, 75, 80, 86, 89, 90) == [80, 86]
    assert kept(103, 90, 100, 103, 120) == [100, 103]
    assert [architecture(text) for text in ("7.5", "9.0", "12.1")] == [75, 90, 121]


def test_the_smallest_image_for_other_gpus_stands_in() -> None:
    data = bytearray(elf({".nv_fatbin": container(TEXT, LATER, FITS) + container(OLD)}))
    assert fatbin.smallest_foreign(data, 90) == min(OLD, LATER, key=len)
    assert fatbin.smallest_foreign(bytearray(elf({".nv_fatbin": container(FITS, TEXT)})), 90) is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_is_loaded_as_before(tmp_path: Path) -> None:
    content = container(OLD, FITS, LATER)
    (tmp_path / "lib.c").write_text(
        f'__attribute__((section(".nv_fatbin"))) const unsigned char images[] = {{{",".join(map(str, content))}}};\n'
        'int at(int i) { return images[i]; }\nconst char *said(void) { return "still here"; }\n'
    )
    path = tmp_path / "lib.so"
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-o", path, tmp_path / "lib.c"], check=True)
    before = path.read_bytes()
    said = prune(tmp_path, 90, STAND_IN, path)
    assert isinstance(said, fatbin.Pruned)
    assert said.kept == len(FITS)
    library = ctypes.CDLL(str(path))
    library.said.restype = ctypes.c_char_p
    assert library.said() == b"still here"
    assert bytes(library.at(i) for i in range(len(content))) == shrunk(content, FITS)
    after = bytearray(path.read_bytes())
    assert fatbin.sections(after) == fatbin.sections(bytearray(before))


LIMIT = 20_000


def packed(folder: Path, limit: int = LIMIT) -> tuple[Path, Path]:
    """A folder like site-packages, and what is made of it to be carried."""
    site, kept, carry = (folder / name for name in ("site", "kept", "carry"))
    for each in (site / "torch/lib", kept, carry):
        each.mkdir(parents=True, exist_ok=True)
    (site / "torch/__init__.py").write_text("VERSION = 'carried'\n")
    (site / "torch/empty.txt").touch()
    (site / "torch/program").write_bytes(b"#!/bin/sh\n")
    (site / "torch/program").chmod(0o755)
    noise = random.Random(1)
    # Machine code with zeros inside and at its end; noise, which no compression makes smaller.
    code = noise.randbytes(30_000) + bytes(3 << 20) + noise.randbytes(25_000) + bytes(5 << 20)
    (site / "torch/lib/lib.so").write_bytes(elf({".text": code}, loaded=(".text",)))
    assert is_elf(site / "torch/lib/lib.so")
    with ProcessPoolExecutor(1) as pool:
        archives = pack(site, kept, limit, pool)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    write(archives, carry, {"python": version, "capability": "9.0", "machine": ["json", "no_such_module.at_all"]})
    shutil.copyfile(Path(unpack.__file__), carry / "unpack.py")
    return site, carry


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``packed``, which takes the compressor two seconds."""
    folder = tmp_path_factory.mktemp("packed")
    packed(folder)
    return folder


@pytest.fixture
def bundle(once: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of what ``packed`` gives, in ``tmp_path``."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "site", tmp_path / "carry"


def unpacked(carry: Path, into: Path) -> subprocess.CompletedProcess[str]:
    checkout = Path(__file__).parents[2]
    command = [sys.executable, carry / "unpack.py", carry, "--into", into, "--checkout", checkout]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): (path.stat().st_mode & 0o777, path.read_bytes()) for path in files}


def test_archives_are_as_small_as_asked_and_their_manifest_has_every_piece(bundle: tuple[Path, Path]) -> None:
    _, carry = bundle
    archives = json.loads((carry / "manifest.json").read_text())["archives"]
    assert sorted(path.name for path in carry.glob("slim-*")) == sorted(archives)
    assert len(archives) > 2
    for name, pieces in archives.items():
        content = (carry / name).read_bytes()
        assert len(content) <= LIMIT
        ends = [0, *itertools.accumulate(piece["size"] for piece in pieces)]
        assert ends[-1] == len(content)
        hashes = [hashlib.sha256(content[a:b]).hexdigest() for a, b in itertools.pairwise(ends)]
        assert hashes == [piece["sha256"] for piece in pieces]


def test_a_second_run_compresses_nothing_and_leaves_no_archive_of_the_first(
    bundle: tuple[Path, Path], tmp_path: Path
) -> None:
    _, carry = bundle
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    before = contents(carry)
    packed(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()} == first
    assert contents(carry) == before
    packed(tmp_path, 10 * LIMIT)
    assert [path.name for path in carry.glob("slim-*")] == ["slim-1-of-1"]


def test_blocks_have_every_byte_once(tmp_path: Path) -> None:
    sizes = {"a.py": 10, "b.py": 0, "c.so": 25, "d.py": 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    found = [*blocks(tmp_path, [tmp_path / name for name in sizes], 15)]
    assert [sum(extent.length for extent in block) for block in found] == [15, 15, 10]
    for name, size in sizes.items():
        extents = [extent for block in found for extent in block if extent.path == name]
        assert [extent.offset for extent in extents] == [0, *itertools.accumulate(e.length for e in extents[:-1])]
        assert sum(extent.length for extent in extents) == size


def test_unpacking_in_parts_says_what_is_missing_and_ends_with_an_environment(
    bundle: tuple[Path, Path], tmp_path: Path
) -> None:
    site, carry = bundle
    names = sorted(path.name for path in carry.glob("slim-*"))
    away, into = tmp_path / "away", tmp_path / "into"
    away.mkdir()
    for name in names[1:]:
        (carry / name).rename(away / name)
    for number, name in enumerate(names, 1):
        if number > 1:
            # As where one at a time is carried: the one before is no longer there.
            (away / name).rename(carry / name)
            (carry / names[number - 2]).unlink()
        said = unpacked(carry, into)
        assert said.returncode == 0, said.stderr
        assert f"{number} of {len(names)} archives" in said.stdout
        if names[number:]:
            assert f"still missing: {' '.join(names[number:])}\n" in said.stdout
            assert not (into / "bin").exists()
    assert "no no_such_module.at_all," in said.stderr
    command = re.search(r"^(\S+/bin/python) -m benchmarks.gpu$", said.stdout, re.MULTILINE)
    assert command
    there = into / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    assert contents(site).items() <= contents(there).items()
    assert (there / "torch/lib/lib.so").stat().st_blocks * 512 < 1 << 20, "zeros take no room"
    # Its torch comes before the machine's; the machine's packages and the checkout's are there; so is the environment.
    asked = (
        "import os, torch, pydantic, rljob_api, benchmarks.gpu.parts; "
        "print(torch.VERSION, pydantic.__file__, rljob_api.__file__, os.environ['HF_HUB_OFFLINE'])"
    )
    answer = subprocess.run([command[1], "-c", asked], cwd="/", capture_output=True, text=True, check=True, env={})
    checkout = Path(__file__).parents[2]
    import pydantic

    assert answer.stdout.split() == ["carried", pydantic.__file__, str(checkout / "api/rljob_api/__init__.py"), "1"]
    before = contents(into)
    assert unpacked(carry, into).returncode == 0
    assert contents(into) == before


def test_a_flipped_byte_is_refused_by_name_and_brought_again(bundle: tuple[Path, Path], tmp_path: Path) -> None:
    site, carry = bundle
    name = sorted(path.name for path in carry.glob("slim-*"))[1]
    good = (carry / name).read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    (carry / name).write_bytes(bad)
    said = unpacked(carry, tmp_path / "into")
    assert said.returncode == 1
    assert said.stderr.startswith(f"{name}: ")
    assert f"still missing: {name}\n" in said.stdout
    assert not (tmp_path / "into/bin").exists()
    (carry / name).write_bytes(good[:-1])
    assert f"{name}: " in unpacked(carry, tmp_path / "into").stderr, "a file that was cut off"
    (carry / name).write_bytes(good)
    assert unpacked(carry, tmp_path / "into").returncode == 0
    there = tmp_path / "into" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    assert contents(site).items() <= contents(there).items()


def test_another_bundle_or_python_is_refused(bundle: tuple[Path, Path], tmp_path: Path) -> None:
    _, carry = bundle
    manifest = json.loads((carry / "manifest.json").read_text())
    assert unpacked(carry, tmp_path / "into").returncode == 0
    (carry / "manifest.json").write_text(json.dumps(manifest | {"capability": "8.0"}))
    said = unpacked(carry, tmp_path / "into")
    assert (said.returncode, "another manifest" in said.stderr) == (1, True)
    (carry / "manifest.json").write_text(json.dumps(manifest | {"python": "3.1"}))
    said = unpacked(carry, tmp_path / "new")
    assert (said.returncode, said.stderr.startswith("made for Python 3.1; this is ")) == (1, True)


def test_everything_that_is_carried_is_pinned_with_hashes() -> None:
    pinned = entries()
    assert [name for name in CARRIED if "--hash=sha256:" not in pinned.get(name, "")] == []


@pytest.mark.parametrize(
    ("path", "carried"),
    [
        ("torch/__init__.py", True),
        ("torch/testing/_internal/common_utils.py", True),
        ("torch/include/ATen/ATen.h", True),
        ("torch/lib/libtorch_cuda.so", True),
        ("torch-2.13.0.dist-info/METADATA", True),
        ("torch-2.13.0.dist-info/RECORD", False),
        ("vllm/tests/test_one.py", False),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("botocore/data/s3/2006-03-01/service-2.json.gz", True),
        ("botocore/data/ec2/2016-11-15/service-2.json.gz", False),
        ("triton/backends/nvidia/lib/libdevice.10.bc", True),
        ("triton/backends/nvidia/include/cuda.h", True),
        ("triton/backends/nvidia/bin/ptxas", False),
        ("ray/rllib/algorithm.py", False),
    ],
)
def test_what_is_left_out(path: str, carried: bool) -> None:
    assert carried is not any(re.search(pattern, path) for pattern in LEFT_OUT.values())


def test_kernels_that_parts_call_are_carried() -> None:
    torch, fa3 = (re.compile(pattern) for pattern in KERNELS_LEFT_OUT.values())
    traits = "_ZN13pytorch_flash16flash_fwd_kernelINS_23Flash_fwd_kernel_traitsILi{}ELi128ELN7cutlass{}E"
    assert not torch.search(traits.format(64, "10bfloat16_t"))
    assert not torch.search(traits.format(128, "10bfloat16_t"))
    assert torch.search(traits.format(256, "10bfloat16_t"))
    assert torch.search(traits.format(64, "6half_t"))
    loop = "CollectiveMainloopFwdSm90ILi2ENS_4cuteELi{}ENS_{}EfNS_4arch4Sm90E"
    assert not fa3.search(loop.format(64, "10bfloat16_t"))
    assert fa3.search(loop.format(256, "10bfloat16_t"))
    assert fa3.search(loop.format(64, "6half_t"))


def test_each_layer_says_whether_it_works_and_one_that_does_not_keeps_no_other_from_being_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = {"a sum": lambda: check.near("a sum", 0.2, 0.1), "a product": lambda: check.near("a product", 0.1, 0.1)}
    monkeypatch.setattr(check, "LAYERS", tried)
    assert check.main() == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL a sum: ValueError: a sum: 0.2 from what it should be, at most 0.1 (")
    assert second.startswith("ok   a product: 0.1 from float32 (")
    with pytest.raises(ValueError, match="nan from what it should be"):
        check.near("a sum", float("nan"), 0.1)
    del tried["a sum"]
    assert check.main() == 0


@pytest.mark.slow(
    stands_for="test_each_layer_says_whether_it_works_and_one_that_does_not_keeps_no_other_from_being_tried"
)
def test_where_nothing_works_each_layer_says_so() -> None:
    command = [sys.executable, Path(check.__file__)]
    said = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert said.returncode == 1
    names = [line.removeprefix("FAIL ").partition(":")[0] for line in said.stdout.splitlines()]
    assert names == [*check.LAYERS]
