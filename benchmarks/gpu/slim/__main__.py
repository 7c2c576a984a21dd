"""What gpu-check needs on a machine that has torch 2.11 for CUDA 13, no network, and a narrow channel:

.venv/bin/python -m benchmarks.gpu.slim FOLDER          # where there is an index; Linux on x86-64

FOLDER/carry is what to carry: archives of torch, vLLM, Ray and what they import, with the versions and hashes of
requirements/, less what no part needs, and with code for one kind of GPU; unpack.py, which puts them to use; check.py.
A second run goes on with what a first one has fetched and compressed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.gpu.slim.contents import CARRIED, KERNELS_LEFT_OUT, LARGE, MACHINE
from benchmarks.gpu.slim.fatbin import Pruned
from benchmarks.gpu.slim.pack import extract, is_elf, pack, prune, stand_in, write
from benchmarks.gpu.wheels import download, entries

MEBI = 1 << 20


def architecture(capability: str) -> int:
    """90 of "9.0". Raises ``ArgumentTypeError``."""
    if not re.fullmatch(r"[1-9]\d?\.\d", capability):
        raise argparse.ArgumentTypeError(f"{capability!r} is no compute capability: 9.0, say, as nvidia-smi gives it")
    return int(capability.replace(".", ""))


def fetch(folder: Path) -> list[Path]:
    """The wheels of all that is carried, of exactly the versions that requirements/ has; those in the folder stay."""
    pinned = entries()
    have = _those(pinned, folder)
    # One after the other, so that what came stays where a later one fails; pip keeps nothing of a call that fails.
    wanted = sorted(CARRIED - have.keys())
    for names in ([name for name in wanted if name not in LARGE], *([name] for name in wanted if name in LARGE)):
        if names:
            download("".join(pinned[name] for name in names), folder)
    have = _those(pinned, folder)
    if absent := sorted(CARRIED - have.keys()):
        raise SystemExit(f"no wheel came for {', '.join(absent)}")
    return sorted(have.values())


def _those(pinned: dict[str, str], folder: Path) -> dict[str, Path]:
    """The folder's wheels whose hashes are among those of ``pinned``, by name."""
    found: dict[str, Path] = {}
    for wheel in folder.glob("*.whl"):
        name = canonicalize_name(parse_wheel_filename(wheel.name)[0])
        with wheel.open("rb") as file:
            if name in CARRIED and hashlib.file_digest(file, "sha256").hexdigest() in pinned[name]:
                found[name] = wheel
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="6 GB while it works")
    parser.add_argument("--capability", default="9.0", help="the GPU's compute capability (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=40, help="an archive's largest size in MiB (default: 40)")
    asked = parser.parse_args()
    try:
        wanted = architecture(asked.capability)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if asked.megabytes < 1:
        parser.error("--megabytes: 1 or more")
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started:4.0f} s  {what}", flush=True)

    folder: Path = asked.folder.resolve()
    wheels, kept, carry = (folder / name for name in ("wheels", "pieces", "carry"))
    for each in (wheels, kept, carry):
        each.mkdir(parents=True, exist_ok=True)
    say(f"fetching {len(CARRIED)} wheels into {wheels}")
    found = fetch(wheels)
    with tempfile.TemporaryDirectory(prefix="site-", dir=folder) as temporary, ProcessPoolExecutor() as pool:
        site = Path(temporary)
        say("taking out what is needed")
        left_out: Counter[str] = Counter()
        for one in pool.map(partial(extract, site=site), found):
            left_out.update(one)
        code = sorted(path for path in site.rglob("*") if path.is_file() and is_elf(path))
        say(f"pruning {len(code)} files of machine code")
        images = [image for image in pool.map(partial(stand_in, architecture=wanted), code) if image]
        image = min(images, key=lambda image: (len(image), image), default=None)
        results = [*pool.map(partial(prune, site, wanted, image), code)]
        say("compressing; the largest step")
        archives = pack(site, kept, asked.megabytes * MEBI, pool)
    about = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "capability": asked.capability}
    write(archives, carry, about | {"machine": MACHINE})
    for name in ("unpack.py", "check.py"):
        shutil.copyfile(Path(__file__).with_name(name), carry / name)
    pruned = [(path, result) for path, result in zip(code, results, strict=True) if isinstance(result, Pruned)]
    sizes = [sum(piece.size for piece in pieces) for pieces in archives]
    say(f"{sum(sizes) / MEBI:.0f} MiB in {len(sizes)} archives of at most {max(sizes) / MEBI:.1f} MiB\n")
    print(f"Left out as code that a GPU of capability {asked.capability} does not run, or that no part calls:")
    for path, result in pruned:
        if result.dropped > MEBI or result.without:
            whole = (result.dropped + result.kept) / MEBI
            print(f"  {path.relative_to(site)}: {result.dropped / MEBI:.0f} of {whole:.0f} MiB; of its containers "
                  f"{result.without} have no code for it ({result.only_ptx} have PTX, which is not carried), "
                  f"{result.by_name} no kernel that is called")  # fmt: skip
    for file, pattern in KERNELS_LEFT_OUT.items():
        print(f"  not called, in {file}: {pattern}")
    for text in (result for result in results if isinstance(result, str)):
        print(f"  carried whole, since it is not known how to prune it: {text}")
    print("Left out as files:")
    for reason, size in left_out.items():
        print(f"  {size / MEBI:.0f} MiB: {reason}")
    print(f"""
Carry all of {carry} over, in any order and as many times as it takes, and this checkout. There, in the checkout, with
a Python {about["python"]} that has torch 2.11 for CUDA 13 and what it is used with:
python3 FOLDER/unpack.py FOLDER    # FOLDER: what came over; again after each that comes""")


if __name__ == "__main__":
    main()
