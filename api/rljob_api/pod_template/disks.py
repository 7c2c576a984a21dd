"""Volumes of particular storage systems, as far as Kubernetes checks more than that their fields are there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.registry import PodSeen, chosen, of, required, within
from rljob_api.violations import Violation

_INITIATOR = (
    r"iqn\.\d{4}-\d{2}\.([A-Za-z0-9\-.]+)(:[^,;*&$|\s]+)",
    r"eui.[A-Za-z0-9]{16}",
    r"naa.[A-Za-z0-9]{32}",
)
_RESERVED = (".kubernetes.io", ".k8s.io")


@of("QuobyteVolumeSource")
def registries_have_ports(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateQuobyteVolumeSource."""
    registry = source.text("registry")
    pairs = [re.fullmatch(r"([^:\[\]]*|\[[^\[\]]*\]):[^:\[\]]*", pair) for pair in registry.split(",")]
    if registry and not all(pairs):
        yield Violation(source.at("registry"), f'"{registry}" is not a list of host:port', "write host:port,host:port")
    elif len(source.text("tenant")) > 64:
        yield Violation(source.at("tenant"), "is too long", "use at most 64 characters")


@of("FlockerVolumeSource")
def datasets_are_named_once(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateFlockerVolumeSource."""
    if bool(source.text("datasetName")) == bool(source.text("datasetUUID")):
        yield Violation(source.path, "needs exactly one of datasetName and datasetUUID", "set one")
    if "/" in source.text("datasetName"):
        yield Violation(source.at("datasetName"), "contains /", "write the name without it")


@of("AzureDiskVolumeSource")
def disks_have_addresses(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateAzureDisk."""
    yield from chosen(source, "cachingMode")
    yield from chosen(source, "kind")
    kind, address = source.text("kind"), source.text("diskURI")
    beginning = "/subscriptions/" if kind == "Managed" else "https://"
    if source.get("kind") is not None and not address.startswith(beginning):
        yield Violation(source.at("diskURI"), f"does not begin with {beginning}", "write the disk's full address")


@of("ISCSIVolumeSource")
def targets_have_names(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateISCSIVolumeSource."""
    yield from within(source, "lun", 0, 255)
    for name in ("iqn", "initiatorName"):
        text, given = source.text(name), source.get(name) is not None
        if given and (text or name != "iqn") and not any(re.fullmatch(form, text) for form in _INITIATOR):
            yield Violation(source.at(name), f'"{text}" is not an iSCSI name', "start it with iqn., eui. or naa.")
    if (source.flag("chapAuthDiscovery") or source.flag("chapAuthSession")) and source.get("secretRef") is None:
        yield Violation(source.at("secretRef"), "is required by CHAP", "set it to the Secret's name")


@of("FCVolumeSource")
def targets_are_of_one_kind(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateFCVolumeSource."""
    targets = source.items("targetWWNs")
    if bool(targets) == bool(source.items("wwids")):
        yield Violation(source.at("targetWWNs"), "needs exactly one of targetWWNs and wwids", "set one")
    if targets:
        if source.number("lun") is None:
            yield Violation(source.at("lun"), "is required by targetWWNs", "add it")
        yield from within(source, "lun", 0, 255)


@of("GCEPersistentDiskVolumeSource", "AWSElasticBlockStoreVolumeSource")
def partitions_are_small_numbers(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateGCEPersistentDiskVolumeSource, validateAWSElasticBlockStoreVolumeSource."""
    yield from within(source, "partition", 0, 255)


@of("StorageOSVolumeSource")
def volumes_have_labels(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateStorageOSVolumeSource."""
    for name in ("volumeName", "volumeNamespace"):
        yield from names.label(source.at(name), source.text(name))


@of("StorageOSVolumeSource", "CinderVolumeSource")
def secrets_are_named(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateStorageOSVolumeSource, validateCinderVolumeSource."""
    secret = source.get("secretRef")
    if secret is not None:
        yield from required(secret, "name")


@of("FlexVolumeSource")
def options_are_the_drivers_own(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateFlexVolumeSource."""
    for key, value in source.entries("options").items():
        if f".{key.partition('/')[0].lower()}".endswith(_RESERVED):
            yield Violation(value.path, "is in a Kubernetes domain", "use the driver's own domain")
