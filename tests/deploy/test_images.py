"""Archives of images: what a container engine reads in them agrees with the files they were packed from."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import yaml
from requirements.lock import pins

from testcluster import building
from testcluster.images import Image, pack, read_configuration, read_names

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}")
"""A tag for people, and the digest, which nobody can move."""


def packed(folder: Path, name: str = "image.tar") -> Path:
    layers = [folder / "first", folder / "second"]
    for layer in layers:
        layer.mkdir(exist_ok=True)
        (layer / f"{layer.name}.txt").write_text(layer.name)
    image = Image("rljob.test/example:1", entrypoint=["/first"], user="65532", labels={"a": "b"})
    pack(image, layers, folder / name)
    return folder / name


def test_layers_are_named_by_their_digests(tmp_path: Path) -> None:
    with tarfile.open(packed(tmp_path)) as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        config_bytes = archive.extractfile(manifest["Config"]).read()  # type: ignore[union-attr]
        layers = [archive.extractfile(name).read() for name in manifest["Layers"]]  # type: ignore[union-attr]
    assert manifest["RepoTags"] == ["rljob.test/example:1"]
    assert manifest["Config"] == hashlib.sha256(config_bytes).hexdigest() + ".json"
    config = json.loads(config_bytes)
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    assert len(config["history"]) == len(layers)
    assert (config["config"]["User"], config["config"]["Labels"]) == ("65532", {"a": "b"})
    with tarfile.open(fileobj=io.BytesIO(layers[1])) as layer:
        assert layer.extractfile("./second.txt").read() == b"second"  # type: ignore[union-attr]
        assert {(member.uid, member.gid, member.mtime) for member in layer.getmembers()} == {(0, 0, 0)}


def test_names_are_those_of_all_images_in_an_archive(tmp_path: Path) -> None:
    def archive(entry: str, content: object) -> Path:
        data = json.dumps(content).encode()
        with tarfile.open(tmp_path / "saved.tar", "w") as out:
            member = tarfile.TarInfo(entry)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
        return tmp_path / "saved.tar"

    assert read_names(packed(tmp_path)) == ["rljob.test/example:1"]
    # As `docker save` writes two images, one of them without a name; and the form that has an index instead.
    saved = archive("manifest.json", [{"RepoTags": ["a:1", "b:2"]}, {"RepoTags": None}])
    assert read_names(saved) == ["a:1", "b:2"]
    assert read_names(archive("index.json", {})) == []


def test_the_same_files_make_the_same_archive_layers(tmp_path: Path) -> None:
    def layer_names(archive: Path) -> list[str]:
        with tarfile.open(archive) as opened:
            return opened.getnames()

    assert layer_names(packed(tmp_path, "one.tar")) == layer_names(packed(tmp_path, "two.tar"))


def test_what_comes_from_a_registry_is_pinned_by_its_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    bases = dict(re.findall(r"^ARG (\w+_IMAGE)=(.*)$", text, flags=re.MULTILINE))
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, flags=re.MULTILINE)
    ours = {name for _, name in stages}
    foreign = {image for image, _ in stages if image not in ours}
    assert foreign == {f"${{{name}}}" for name in bases}
    nodes = yaml.safe_load((ROOT / "deploy/kind/cluster.yaml").read_text())["nodes"]
    for image in [*bases.values(), *(node["image"] for node in nodes)]:
        assert PINNED.fullmatch(image), image


def test_the_images_carry_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = re.findall(r'org.opencontainers.image.version="([^"]*)"', (ROOT / "Dockerfile").read_text())
    assert {*labels, building.VERSION} == {project["version"]}
    assert len(labels) == 2


def test_an_archive_says_how_its_image_is_run(tmp_path: Path) -> None:
    configuration = read_configuration(packed(tmp_path))
    assert configuration["config"]["User"] == "65532"
    assert configuration["config"]["Labels"] == {"a": "b"}


def test_the_gpu_image_has_what_nccl_needs_for_infiniband_and_looks_that_it_loads() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (installed,) = re.findall(r'"\$\{ACCELERATOR\}" = gpu \]; then set -- (.*?); else', text)
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed.split())
    assert 'ctypes.CDLL("libibverbs.so.1")' in text


def test_the_gpu_image_has_a_cuda_compiler_that_nothing_finds_as_the_pages_say() -> None:
    """Where FlashInfer looks: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda (tests/trainer/rollout/test_vllm_arguments.py
    says what vLLM concludes). The package's nvcc is in nvidia/cu13/bin."""
    assert {"nvidia-cuda-nvcc", "ninja"} <= pins((ROOT / "requirements/gpu.txt").read_text()).keys()
    stage = (ROOT / "Dockerfile").read_text().partition(" AS trainer\n")[2]
    settings = " ".join(re.findall(r"^ENV (.*)$", stage, flags=re.MULTILINE))
    assert set(re.findall(r"PATH=(\S+)", settings)) == {"/opt/rljob/bin:$PATH"}
    assert "CUDA_" not in settings
    page = (ROOT / "docs/real-cluster.md").read_text()
    assert "site-packages/nvidia/cu13/bin`; but nothing finds it there" in page
    minor = re.search(r"^ARG PYTHON_IMAGE=.*python:(3\.\d+)", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert minor is not None
    assert f"/opt/rljob/lib/python{minor[1]}/site-packages/nvidia" in page


def test_a_checkouts_interpreter_is_in_the_image_under_each_name_that_environments_link_to(tmp_path: Path) -> None:
    folder = Path(sys._base_executable).resolve().parent  # type: ignore[attr-defined]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = tmp_path / "where" / "bin"
    building._place_python(folder, place, version)
    if version == building.DEBIANS_PYTHON:
        assert {str(path.readlink()) for path in place.iterdir()} <= {f"python{version}", f"/usr/bin/python{version}"}
        return
    library = place.parent / "lib" / f"python{version}"
    assert not (library / "site-packages").exists()
    for name in ("python", "python3", f"python{version}"):
        command = [place / name, "-I", "-c", "import ssl, sqlite3, sys; print(sys.prefix)"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert said == str(place.parent)
