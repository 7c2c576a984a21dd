"""Makes the project's virtual environment: `python3.12 requirements/install.py [--accelerator gpu]`.

Needs nothing but Python 3.11, 3.12 or 3.13 and a package index. Says what it does, refuses downloads without a hash in
requirements/ (but for torch where it isn't the index's ordinary wheel; it says so then), compiles bytecode (the first
import of vLLM takes a minute without) and does nothing at all when the environment is already right; one of another
Python or accelerator is made anew, and one for GPUs stays so until `--accelerator cpu` is asked for. Only the standard
library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = "rljob-installed"
KEPT_ACCELERATOR = "rljob-accelerator"
"""In the environment: what it is made for."""
ACCELERATORS = ("cpu", "gpu")
TAKES_GB = {"cpu": 7, "gpu": 10}
"""On disk, at most: for CPUs with the ordinary build of torch, for GPUs what the pinned wheels hold, and bytecode."""
SIZES = {"cpu": "0.9 to 7 GB", "gpu": "4.2 GB of wheels, about 10 GB on disk"}
REQUIREMENTS = ROOT / "requirements"
PAUSES = (5, 20)
"""Seconds before a package index is asked a second and a third time."""
TORCH = "2.13.0"
CPU_BUILD = f"{TORCH}+cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--accelerator",
        choices=ACCELERATORS,
        help="which vLLM to install; default: that of .venv, or cpu for a new one",
    )
    accelerator = parser.parse_args().accelerator or last_accelerator(VENV)
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        version = sys.version.split()[0]
        return fail(f"rljob is pinned for Python 3.11 to 3.13; this is {version}. Try: make PYTHON=/path/to/python3.12")
    wanted = fingerprint(accelerator)
    stamp = VENV / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    free = shutil.disk_usage(ROOT).free
    takes = TAKES_GB[accelerator]
    if free < (takes + 1) * 10**9:
        return fail(f"the environment takes up to {takes} GB, and {ROOT} has only {free / 1e9:.1f} GB free.")
    prepare(VENV, accelerator)
    environment = index_settings()
    command = install_command(accelerator, environment, VENV)
    say(f"installing pinned packages for {accelerator} ({SIZES[accelerator]}, 1 to 10 minutes)")
    extras = [f"--extra={extra}" for extra in ("trainer", accelerator, "operator", "dev")]
    fetch(*command, "--compile-bytecode", "--requirement", "pyproject.toml", *extras, environment=environment)
    fetch(*install_project(VENV), environment=environment)
    stamp.write_text(wanted)
    say(f"done: {VENV.name}/bin/rljob")
    return 0


def last_accelerator(venv: Path) -> str:
    """What the environment was last made for; cpu where there is none."""
    kept = venv / KEPT_ACCELERATOR
    found = kept.read_text() if kept.exists() else ""
    return found if found in ACCELERATORS else "cpu"


def prepare(venv: Path, accelerator: str) -> None:
    """Sees to it that there is a virtual environment of this Python and for that accelerator, with pip and uv."""
    python = venv / "bin" / "python"
    # The two builds of vLLM are packages of different names with the same files.
    other = accelerator != last_accelerator(venv)
    if other or not python.exists() or asked(python, "-c", "import sys; print(sys.version)").strip() != sys.version:
        say(f"making the virtual environment {venv.name} of Python {platform.python_version()}")
        run(sys.executable, "-m", "venv", "--clear", venv)
    # Before anything is installed: who is interrupted and types the command again means the same.
    (venv / KEPT_ACCELERATOR).write_text(accelerator)
    if not asked(python, "-m", "pip", "--version"):
        run(python, "-m", "ensurepip")  # somebody made the environment without pip
    say("installing uv with pip")
    fetch(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", REQUIREMENTS / "uv.txt")


def fingerprint(accelerator: str) -> str:
    """What the environment was made from: it is remade exactly when this changes."""
    digest = hashlib.sha256(f"{accelerator} {sys.version} {ROOT}".encode())
    for file in [ROOT / "pyproject.toml", *sorted(REQUIREMENTS.glob("*.txt"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def index_settings() -> dict[str, str]:
    """pip's index settings, handed on to uv, which does not read pip's configuration."""
    environment = dict(os.environ)
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.split(".")[-1]] = value.strip("'\"")
    uv_names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "cert": "SSL_CERT_FILE"}
    for option, variable in uv_names.items():
        if option in settings:
            environment.setdefault(variable, settings[option])
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        environment.setdefault("UV_OFFLINE", "1")
    folders = [f for f in settings.get("find-links", "").split() if "://" in f or Path(f).is_dir()]
    if folders:
        environment.setdefault("UV_FIND_LINKS", ",".join(folders))
    return environment


def install_command(accelerator: str, environment: dict[str, str], venv: Path) -> list[str | Path]:
    """What installs packages, whose names come next, in the pinned versions."""
    overrides = ["--overrides", REQUIREMENTS / "cpu-overrides.txt"] if accelerator == "cpu" else []
    pinned = ["--constraints", REQUIREMENTS / f"{accelerator}.txt"]
    options = torch_options(accelerator, environment, venv)
    return [*uv("install", venv), *options, *overrides, "--quiet", "--no-build", *pinned]


def install_project(venv: Path) -> list[str | Path]:
    """What installs the project itself, as this checkout has it at any time."""
    built = ["--build-constraints", REQUIREMENTS / "build.txt", "--require-build-hashes"]
    return [*uv("install", venv), "--quiet", "--no-deps", *built, "--editable", "."]


def torch_options(accelerator: str, environment: dict[str, str], venv: Path) -> list[str | Path]:
    """Chooses the build of torch: for CPUs theirs (0.2 GB instead of 3 GB) where it is on offer.

    It comes from PyTorch's own index, or from one of pip's find-links folders, where the pin alone takes it. The
    ordinary wheels of the package index are known by their hashes, and with one of them whatever has none is refused.
    Of another build there is no hash; all else is checked then, too, and tests see to it that all else has one.
    """
    installed = installed_torch(venv)
    kept = installed.partition("+")[0] == TORCH and (accelerator, installed) != ("gpu", CPU_BUILD)
    taken, way = (installed, []) if kept else torch_on_offer(accelerator, environment, venv)
    told = {TORCH: "the ordinary build", CPU_BUILD: "the CPU build"}.get(taken, taken or "not found")
    hashed = taken in (TORCH, "")
    say(f"torch: {told}{'' if hashed else ', which has no hash in requirements/'}")
    options: list[str | Path] = [*way]
    if hashed:
        options += ["--constraints", REQUIREMENTS / "torch.txt"]
        # uv requires hashes of exact versions only.
        options += [] if way else ["--require-hashes"]
    if installed and not kept:
        options += ["--reinstall-package", "torch"]
    return options


def installed_torch(venv: Path) -> str:
    """The version of torch in the environment; empty where there is none."""
    for about in venv.glob("lib/python3.*/site-packages/torch-*.dist-info"):
        return about.name.removeprefix("torch-").removesuffix(".dist-info")
    return ""


def torch_on_offer(accelerator: str, environment: dict[str, str], venv: Path) -> tuple[str, list[str]]:
    """The build of torch that an empty environment would get, and the options that it takes to get it."""
    # The pin alone would take a CPU build for a GPU where a wheel folder has one.
    ways = [["--torch-backend", "cpu"], []] if accelerator == "cpu" else [[], [f"torch!={CPU_BUILD}"]]
    for way in ways:
        # --reinstall: a torch that is there already says nothing about the index.
        options = ["--reinstall", "--dry-run", "--no-deps", "--color", "never"]
        probe = [*uv("install", venv), *way, *options, f"torch=={TORCH}"]
        try:
            done = subprocess.run(probe, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            continue
        found = re.search(r"^ [+~] torch==(\S+)", done.stderr, flags=re.MULTILINE)
        if found and (accelerator, found[1]) != ("gpu", CPU_BUILD):
            return found[1], way
    return "", []


def uv(verb: str, venv: Path) -> list[str | Path]:
    """The project's own uv, at work on any virtual environment."""
    return [VENV / "bin" / "uv", "pip", verb, "--python", venv / "bin" / "python"]


def asked(*command: str | Path) -> str:
    """What a command prints; nothing where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode else done.stdout


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    except subprocess.CalledProcessError as error:
        told = " ".join(map(str, command))
        sys.exit(fail(f"`{told}` ended with exit code {error.returncode}; its message is above."))


def fetch(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    """As ``run``, for what asks a package index: one that does not answer for a moment is asked three times."""
    for pause in PAUSES:
        if subprocess.run(command, cwd=ROOT, env=environment).returncode == 0:
            return
        say(f"that failed, see above; once more in {pause} s")
        time.sleep(pause)
    run(*command, environment=environment)


def say(text: str) -> None:
    print(f"rljob set-up: {text}", flush=True)


def fail(text: str) -> int:
    print(f"rljob set-up: {text}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
