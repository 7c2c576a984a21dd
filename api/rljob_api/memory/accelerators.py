"""How much memory GPUs have and which are too old, by the labels that NVIDIA's feature discovery gives to nodes, and
quantities as bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from rljob_api.spec.pod import Pod

PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
_MIB = 1 << 20
_MEBIBYTES = {
    "A10": 23028,
    "A10G": 23028,
    "A100-PCIE-40GB": 40960,
    "A100-SXM4-40GB": 40960,
    "A100-80GB-PCIe": 81920,
    "A100-SXM4-80GB": 81920,
    "A30": 24576,
    "A40": 46068,
    "A6000": 49140,
    "B200": 183359,
    "GeForce-RTX-3090": 24576,
    "GeForce-RTX-4090": 24564,
    "GeForce-RTX-5090": 32607,
    "H100-80GB-HBM3": 81559,
    "H100-NVL": 95830,
    "H100-PCIe": 81559,
    "H20": 97871,
    "H200": 143771,
    "L4": 23034,
    "L40": 46068,
    "L40S": 46068,
    "RTX-A6000": 49140,
    "T4": 15360,
    "V100-SXM2-16GB": 16384,
    "V100-SXM2-32GB": 32768,
}
"""As ``nvidia-smi`` shows it, by the product without its maker's name."""
COMPUTE_MAJOR = "nvidia.com/gpu.compute.major"
BEFORE_AMPERE = (
    "^(NVIDIA-)?(Tesla-)?(P4|P40|P100.*|V100.*|T4|T4G|Quadro.*|TITAN.*|GeForce-GTX.*|GeForce-RTX-20.*)(-SHARED)?$"
)
"""Products of a compute capability below 8.0 (https://developer.nvidia.com/cuda-gpus), as an expression that Python and
CEL (RE2) read alike."""
MAJORS_BEFORE_AMPERE = ("5", "6", "7")
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_SMALL = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000)}
_QUANTITY = re.compile(r"^\+?([0-9]+\.?[0-9]*|\.[0-9]+)([a-zA-Z]{0,2})$")


def gpu_memory(pod: Pod) -> int | None:
    """Bytes of a GPU of the nodes that a pod asks for; None where its selector does not tell."""
    said = pod.node_selector.get(MEMORY)
    if said is not None and said.isdecimal():
        return int(said) * _MIB
    product = pod.node_selector.get(PRODUCT)
    return None if product is None else product_memory(product)


def before_ampere(pod: Pod) -> str | None:
    """The label, with its value, by which a pod asks for GPUs of a compute capability below 8.0; None: by none."""
    product, major = pod.node_selector.get(PRODUCT), pod.node_selector.get(COMPUTE_MAJOR)
    if product is not None and re.search(BEFORE_AMPERE, product):
        return f"{PRODUCT}: {product}"
    return f"{COMPUTE_MAJOR}: {major}" if major in MAJORS_BEFORE_AMPERE else None


def product_memory(product: str) -> int | None:
    """Bytes of a GPU by its label, or by its name as ``nvidia-smi`` shows it. A part of one (MIG) is not known."""
    name = product.replace(" ", "-").removeprefix("NVIDIA-").removeprefix("Tesla-").removesuffix("-SHARED")
    size = _MEBIBYTES.get(name)
    return None if size is None else size * _MIB


def known_products() -> list[str]:
    """The names that ``product_memory`` knows, without their maker's."""
    return sorted(_MEBIBYTES)


def bytes_of(quantity: str) -> int | None:
    """A Kubernetes quantity (80Gi, 64G, 1e9) as bytes; None: it is none."""
    found = _QUANTITY.match(quantity)
    if found is None:
        try:
            return int(float(quantity))
        except (ValueError, OverflowError):
            return None
    number, unit = found.groups()
    factors: Mapping[str, int | Fraction] = {**_BINARY, **_DECIMAL, **_SMALL}
    factor = factors.get(unit)
    return None if factor is None else int(Fraction(number) * factor)
