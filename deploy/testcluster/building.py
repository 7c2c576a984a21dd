"""The project's images without a registry: a base made of Debian packages, and the Dockerfile built on it by buildah.

buildah itself is unpacked from Debian's package. What was built before with the same files is not built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from testcluster import debian
from testcluster.commands import run
from testcluster.images import Image, pack
from testcluster.programs import cache_folder, cached

ROOT = Path(__file__).resolve().parents[2]
DEBIANS_PYTHON = "3.11"
PYTHON_IMAGE = f"rljob.test/python:{DEBIANS_PYTHON}"
MOUNTED_IMAGE = "rljob.test/mounted:1"
VERSION = "0.1.0"
ARGUMENTS: dict[str, dict[str, str]] = {
    # PyTorch's own index isn't among the package indexes that this project asks.
    "trainer": {"TORCH_BACKEND": ""},
}
"""Build arguments of a target."""
BUILDAH_PACKAGES = ("buildah", "libgpgme11", "libassuan0", "libgpg-error0", "libdevmapper1.02.1", "libsubid4")
BASE_PACKAGES = (
    *("base-files", "bash", "coreutils", "dash", "sed", "grep", "findutils", "ca-certificates", "netbase", "tzdata"),
    *("libc6", "libgcc-s1", "libstdc++6", "libcrypt1", "libexpat1", "zlib1g", "libssl3", "libbz2-1.0", "liblzma5"),
    *("libffi8", "libsqlite3-0", "libuuid1", "libtirpc3", "libnsl2", "libgssapi-krb5-2", "libkrb5-3", "libk5crypto3"),
    *("libcom-err2", "libkrb5support0", "libkeyutils1", "libncursesw6", "libtinfo6", "libreadline8", "libacl1"),
    *("libattr1", "libselinux1", "libpcre2-8-0", "libgmp10", "libnuma1", "libgomp1", "media-types"),
    *("util-linux", "libsmartcols1"),  # lscpu: vLLM asks it for the CPUs
    *("python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
    *("python3-pip", "python3-setuptools", "python3-wheel", "python3-distutils", "python3-lib2to3"),
)
MOUNTED_LAYOUT = "2"
BASE_LAYOUT = "2"
"""Other ones where `_place_python` and `_make_base` make something else of the same parts."""
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def base_root() -> Path:
    """Root of the base image: Python 3.11, pip, bash and what they need, from Debian."""
    return cached(_name("base", (*BASE_PACKAGES, BASE_LAYOUT)), True, _make_base)


def mounted_image(environment: Path) -> Path:
    """Archive of an image that runs a virtual environment of the host, which pods mount at the path it has here.

    The environment's `python` links to an interpreter outside of it. The image has one at the same place: Debian's
    where that is of the same version, else a copy of the host's own, which needs no more libraries than Debian's does.
    """
    settings = dict(line.split(" = ", 1) for line in (environment / "pyvenv.cfg").read_text().splitlines())
    version = ".".join(settings["version"].split(".")[:2])
    folder = Path(settings["home"])
    archive = _archive("mounted", f"{base_root().name} {environment} {folder} {settings['version']} {MOUNTED_LAYOUT}")
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=archive.parent) as temporary:
            links = Path(temporary, "links")
            links.mkdir()
            _place_python(folder, links / folder.relative_to("/"), version)
            home = links / "home" / "rljob"
            home.mkdir(parents=True)
            for created in (links, *(path for path in links.rglob("*") if path.is_dir())):
                created.chmod(0o755)
            home.chmod(0o777)  # layers are packed as root's
            path = f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
            variables = {"PATH": path, "HOME": "/home/rljob", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            image = Image(MOUNTED_IMAGE, command=["bash"], environment=variables, user="1000:1000")
            pack(image, [base_root(), links], archive)
    return archive


def _place_python(folder: Path, place: Path, version: str) -> None:
    """Puts the interpreter of a host's folder at ``place``, under all names by which environments link to it. A copy
    has its standard library and what it links to, without packages, tests and bytecode."""
    ours = version == DEBIANS_PYTHON
    if ours and folder == Path("/usr/bin"):
        return  # the base has it
    place.mkdir(parents=True)
    for name in ("python", "python3"):
        (place / name).symlink_to(f"python{version}")
    if ours:
        (place / f"python{version}").symlink_to(f"/usr/bin/python{version}")
        return
    shutil.copy(folder / f"python{version}", place)
    library = Path("lib", f"python{version}")
    left_out = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "__pycache__", "config-*", "*.a")
    shutil.copytree(folder.parent / library, place.parent / library, symlinks=True, ignore=left_out)
    for shared in (folder.parent / "lib").glob(f"libpython{version}*.so*"):
        shutil.copy(shared, place.parent / "lib")


def image_name(target: str) -> str:
    """What the image of a target of the Dockerfile is called, in its archive and on nodes."""
    return f"docker.io/rljob/{target}:{VERSION}"


def project_image(target: str, say: Callable[[str], None]) -> Path:
    """Archive of a target of the Dockerfile.

    Raises:
        CommandFailedError: the build failed; the message has its last lines.
    """
    arguments = {"PYTHON_IMAGE": PYTHON_IMAGE, **ARGUMENTS.get(target, {})}
    archive = _archive(target, f"{base_root().name} {json.dumps(arguments)} {_sources_hash(target)}")
    if archive.exists():
        return archive
    say(f"building the {target} image on Debian's Python 3.11; with a registry the Dockerfile has 3.12")
    name = image_name(target)
    store = cache_folder() / "buildah"
    store.mkdir(exist_ok=True)
    policy = store / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    trusted = f"--signature-policy={policy}"
    base = _archive("python", base_root().name)
    if not base.exists():
        pack(Image(PYTHON_IMAGE, command=["python"]), [base_root()], base)
    _buildah(store, "pull", trusted, f"docker-archive:{base}")
    certificates = f"/{CERTIFICATES}"
    options = ["--isolation=chroot", "--network=host", "--layers", f"--volume={certificates}:{certificates}:ro"]
    arguments["SSL_CERT_FILE"] = certificates
    for variable in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        if variable in os.environ:
            arguments[variable] = os.environ[variable]
    options += [f"--build-arg={key}={value}" for key, value in arguments.items()]
    _buildah(store, "build", trusted, *options, f"--target={target}", f"--tag={name}", str(ROOT))
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        unfinished = Path(folder, archive.name)
        _buildah(store, "push", trusted, name, f"docker-archive:{unfinished}:{name}")
        unfinished.rename(archive)
    for older in archive.parent.glob(f"{target}-*.tar"):
        if older != archive:
            older.unlink()
    return archive


def _buildah(store: Path, verb: str, *arguments: str) -> None:
    root = cached(_name("buildah", BUILDAH_PACKAGES), True, lambda to: debian.unpack(BUILDAH_PACKAGES, to))
    # buildah starts itself anew without its environment, so its libraries must lie where everybody's do: they are laid
    # over them, in a mount namespace that ends with the command. So do the mounts that buildah makes.
    overlay = f"mount -t overlay overlay -o lowerdir={root / LIBRARIES}:/{LIBRARIES} /{LIBRARIES}"
    storage = [f"--root={store / 'storage'}", f"--runroot={store / 'run'}", "--storage-driver=overlay"]
    within = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{overlay} && exec "$@"', "buildah"]
    run([*within, str(root / "usr/bin/buildah"), *storage, verb, *arguments])


def _make_base(to: Path) -> None:
    for folder in ("bin", "sbin", "lib", "lib64"):
        (to / "usr" / folder).mkdir(parents=True)
        (to / folder).symlink_to(f"usr/{folder}")
    controls = debian.unpack(BASE_PACKAGES, to)
    for name in ("doc", "man", "locale", "info"):
        run(["rm", "-rf", str(to / "usr/share" / name)])
    # What dpkg would note: the bill of materials is made from it, and scanners of images look for it.
    status = to / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True, exist_ok=True)
    status.write_text("".join(f"{control.rstrip()}\nStatus: install ok installed\n\n" for control in controls))
    # What the packages' scripts would do when they are installed.
    for name in ("python", "python3"):
        (to / "usr/bin" / name).symlink_to("python3.11")
    bundle = sorted((to / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    (to / CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
    (to / CERTIFICATES).write_text("\n".join(certificate.read_text() for certificate in bundle))
    (to / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nrljob:x:1000:1000::/home/rljob:/bin/bash\n")
    (to / "etc/group").write_text("root:x:0:\nrljob:x:1000:\n")
    (to / "root").chmod(0o755)
    to.chmod(0o755)


def _name(kind: str, packages: tuple[str, ...]) -> str:
    return f"{kind}-{hashlib.sha256(repr(packages).encode()).hexdigest()[:12]}"


def _archive(name: str, content: str) -> Path:
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.tar"


def _sources_hash(target: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(_sources(target)):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(target: str) -> Iterator[Path]:
    """The files that go into a target, but for what only names the packages of other targets."""
    yield from (ROOT / name for name in ("Dockerfile", "pyproject.toml", "deploy/images/sbom.py"))
    yield from (ROOT / "requirements").glob("*.txt")
    for folder in ("api", "operator", *(["trainer"] if target == "trainer" else [])):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
