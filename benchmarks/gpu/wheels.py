"""All that is to be installed for this benchmark, as wheels in a folder that can be carried to where no index is:

.venv/bin/python -m benchmarks.gpu.wheels FOLDER          # where there is an index; Linux on x86-64, Python 3.12
.venv/bin/python -m benchmarks.gpu.wheels FOLDER --beside-torch    # for a machine that has torch: under 64 MiB

The project's packages have the hashes of requirements/, those of TRL with vLLM what the index says now.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.environments import PEERS, ROOT, VERSION, uv
from benchmarks.gpu.parts import LEARNER, PARTS, PEER

IMPORTED = ("transformers", "accelerate", "numpy", "psutil", "pyyaml", "pydantic")
"""By the parts that want torch alone, beside torch."""
WITH_TORCH = [part.name for part in PARTS if part.packages == LEARNER and part.gpus == 1 and part.name != "step-trl"]
REQUIREMENTS = ROOT / "requirements"


def own() -> str:
    """What requirements/install.py --accelerator gpu installs, and what it installs with: every version and hash."""
    texts = [(REQUIREMENTS / f"{name}.txt").read_text() for name in ("gpu", "torch", "uv", "build")]
    # gpu.txt names torch without hashes, which are in torch.txt.
    return "".join([re.sub(r"^torch==\S+\n", "", texts[0], flags=re.MULTILINE), *texts[1:]])


def entries() -> dict[str, str]:
    """Those by the package's name."""
    parts = re.split(r"^(?=\S)", own(), flags=re.MULTILINE)
    return {entry.partition("==")[0]: entry for entry in parts if "==" in entry}


def beside_torch() -> str:
    """Of those what the parts that want torch alone need beside torch: what is imported, and what that requires."""
    pinned = entries()
    found: set[str] = set()
    coming = list(IMPORTED)
    while coming:
        name = re.sub(r"[-_.]+", "-", coming.pop()).lower()
        if name not in found and name != "torch":
            found.add(name)
            asked = (Requirement(line) for line in requires(name) or ())
            coming += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return "".join(pinned[name] for name in sorted(found))


def peers() -> str:
    """What the environment of TRL with vLLM will hold, as the index resolves it."""
    with tempfile.TemporaryDirectory() as folder:
        asked, pinned = Path(folder, "asked.txt"), Path(folder, "pinned.txt")
        asked.write_text("\n".join(PEERS[PEER].packages))
        uv("pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url",
           "--no-emit-find-links", f"--python-version={VERSION}", "--python-platform=x86_64-manylinux_2_28",
           "--output-file", pinned, asked)  # fmt: skip
        return pinned.read_text()


def download(requirements: str, folder: Path) -> None:
    """Fetches what is not in the folder yet. Raises ``CalledProcessError``; pip says why."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--progress-bar=off", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--requirement", file.name]
        subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="about 12 GB")
    parser.add_argument("--beside-torch", action="store_true", help="what parts that want torch alone need beside it")
    asked = parser.parse_args()
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    if asked.beside_torch:
        download(beside_torch(), folder)
        size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
        print(f"""{size / 2**20:.0f} MiB in {folder}. Carry it and this checkout over, and there, in the checkout:
python{VERSION} -m pip install --no-index --find-links /where/it/is {" ".join(IMPORTED)}
python{VERSION} -m benchmarks.gpu --only {" ".join(WITH_TORCH)}""")
        return
    for what, requirements in (("rljob with its GPU packages", own()), ("TRL with vLLM", peers())):
        print(f"fetching {what}: {requirements.count('==')} wheels", flush=True)
        download(requirements, folder)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"""{size / 1e9:.1f} GB in {folder}. Carry it and this checkout over, and there, in the checkout:
export PIP_NO_INDEX=1 PIP_FIND_LINKS=/where/it/is
make install ACCELERATOR=gpu PYTHON=python{VERSION}
make gpu-check""")


if __name__ == "__main__":
    main()
