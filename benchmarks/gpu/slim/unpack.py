"""Puts to use what `benchmarks.gpu.slim` made, on the machine with the GPU; needs Python's standard library alone:

python3 FOLDER/unpack.py FOLDER      # in the checkout; again after each archive that comes

Unpacks the archives of FOLDER that are there and says which are missing. Once every one came: a virtual environment
over this Python's packages, which are used and not changed, and the command that runs gpu-check with it. Each piece is
compared with the manifest's SHA-256 before it is unpacked; one that differs is named, and the exit code is 1.

An archive is pieces one after the other. A piece is an xz file of one line of JSON, [path, mode, the file's size,
offset, length] for each stretch of a file, and the stretches' bytes.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
BLOCK = 1 << 20
"""Zeros of so many bytes become holes in files."""
RARE = re.compile(
    r"/(transformers|vllm/model_executor)/models/(?!auto/|qwen2|interfaces|registry|utils)|/torch/testing/"
)
"""Not compiled ahead: many modules, of which few are imported."""
ENVIRONMENT = {
    # torch 2.13 was built with a newer cuDNN than torch 2.11 brings.
    "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",
    # Kernels that are not carried.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    # There is no network.
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}
"""What the environment's Python sets where it is not set."""


def unpack(site: Path, done: Path, piece: tuple[Path, int, int, str]) -> str | None:
    """One piece, given by archive, offset, size and SHA-256. What is wrong with it, if anything."""
    archive, offset, size, sha256 = piece
    stamp = done / sha256
    if stamp.exists():
        return None
    with archive.open("rb") as file:
        file.seek(offset)
        blob = file.read(size)
    if hashlib.sha256(blob).hexdigest() != sha256:
        return f"{archive.name}: the {size} bytes from byte {offset} on are not what was packed"
    head, _, content = lzma.decompress(blob).partition(b"\n")
    data = memoryview(content)
    at = 0
    for path, mode, total, begin, length in json.loads(head):
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_RDWR | os.O_CREAT, mode)
        try:
            os.ftruncate(handle, total)
            for step in range(0, length, BLOCK):
                part = data[at + step : at + min(step + BLOCK, length)]
                if part != bytes(len(part)):
                    written = os.pwrite(handle, part, begin + step)
                    if written != len(part):
                        return f"{target}: no room for it"
        finally:
            os.close(handle)
        at += length
    stamp.touch()
    return None


def link(site: Path) -> None:
    """The machine's CUDA libraries, but NCCL, and Triton's programs to where torch and Triton look for theirs."""
    for folder, but in (("nvidia", "nccl"), ("triton/backends/nvidia/bin", "")):
        name, _, below = folder.partition("/")
        spec = PathFinder.find_spec(name)
        for origin in (spec and spec.submodule_search_locations) or ():
            for theirs in sorted((Path(origin) / below).glob("*")):
                ours = site / folder / theirs.name
                if theirs.name not in (but, "__pycache__") and not ours.exists():
                    ours.parent.mkdir(parents=True, exist_ok=True)
                    ours.unlink(missing_ok=True)
                    ours.symlink_to(theirs)


def make_environment(into: Path, site: Path, checkout: Path) -> None:
    """A virtual environment of this Python: what was unpacked, then the machine's packages, then the checkout's."""
    base = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    programs = into / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("python", "python3", f"python{VERSION}"):
        (programs / name).unlink(missing_ok=True)
        (programs / name).symlink_to(base)
    machine = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    paths = [*machine, *(str(checkout / name) for name in (".", "trainer", "api"))]
    (site / "slim_environment.py").write_text(
        f"import os\nfor name, value in {ENVIRONMENT!r}.items():\n    os.environ.setdefault(name, value)\n"
    )
    (site / "slim.pth").write_text("\n".join([*paths, "import slim_environment", ""]))
    script = programs / "rljob"
    script.write_text(
        f"#!{programs}/python\nimport sys\n\nfrom rljob_trainer.cli import main\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    script.chmod(0o755)
    (into / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")


def absent(modules: list[str]) -> list[str]:
    """Those of the machine's modules that this Python does not find; parents are not imported."""
    return [name for name in modules if PathFinder.find_spec(name.partition(".")[0]) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the manifest and any of the archives")
    parser.add_argument("--into", type=Path, default=Path("/tmp/rljob-slim"), help="default: %(default)s; 3 GB")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="of rljob; default: the current folder")
    asked = parser.parse_args()
    into, checkout = asked.into.absolute(), asked.checkout.absolute()
    text = (asked.folder / "manifest.json").read_text()
    manifest = json.loads(text)
    if manifest["python"] != VERSION:
        print(f"made for Python {manifest['python']}; this is {VERSION}", file=sys.stderr)
        return 1
    if Path(sys.prefix).absolute() == into:
        print("run it with the machine's own Python", file=sys.stderr)
        return 1
    if not (checkout / "benchmarks" / "gpu" / "parts.py").exists():
        print(f"{checkout} is no checkout of rljob: go there, or give --checkout", file=sys.stderr)
        return 1
    site, done = into / "lib" / f"python{VERSION}" / "site-packages", into / "unpacked"
    done.mkdir(parents=True, exist_ok=True)
    earlier = into / "manifest.json"
    if earlier.exists() and earlier.read_text() != text:
        print(f"{into} holds what another manifest lists: delete it, or give --into", file=sys.stderr)
        return 1
    earlier.write_text(text)
    jobs = []
    for name, pieces in manifest["archives"].items():
        offset = 0
        for piece in pieces:
            if (asked.folder / name).exists():
                jobs.append((asked.folder / name, offset, piece["size"], piece["sha256"]))
            offset += piece["size"]
    with ProcessPoolExecutor() as pool:
        wrong = [text for text in pool.map(partial(unpack, site, done), jobs) if text]
    for each in wrong:
        print(f"{each}: bring it again", file=sys.stderr)
    missing = [
        name
        for name, pieces in manifest["archives"].items()
        if not all((done / piece["sha256"]).exists() for piece in pieces)
    ]
    number = len(manifest["archives"])
    free = shutil.disk_usage(into).free >> 30
    print(f"{number - len(missing)} of {number} archives are unpacked in {into}, which has {free} GiB left")
    if missing:
        print(f"still missing: {' '.join(missing)}")
        return 1 if wrong else 0
    if lacking := absent(manifest["machine"]):
        print(f"this Python has no {', '.join(lacking)}, which may be asked for", file=sys.stderr)
    link(site)
    make_environment(into, site, checkout)
    compileall.compile_dir(site, quiet=2, workers=0, rx=RARE)
    print(f"""In {checkout}, on a GPU of compute capability {manifest["capability"]}:
{into}/bin/python {Path(__file__).absolute().parent}/check.py    # whether each layer works, in a minute
{into}/bin/python -m benchmarks.gpu""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
