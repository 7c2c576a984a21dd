"""Volumes: one source each, and what each kind of source needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rljob_api.pod_template import names
from rljob_api.pod_template.environment import IN_FILES, amount_field, pod_field
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.paths import descending, file_name, without_backsteps
from rljob_api.pod_template.quantities import known
from rljob_api.pod_template.registry import Check, PodSeen, chosen, of, required, within
from rljob_api.violations import Violation

NEEDED: Mapping[str, Sequence[str]] = {
    "SecretVolumeSource": ("secretName",),
    "ConfigMapVolumeSource": ("name",),
    "SecretProjection": ("name",),
    "ConfigMapProjection": ("name",),
    "PersistentVolumeClaimVolumeSource": ("claimName",),
    "HostPathVolumeSource": ("path",),
    "NFSVolumeSource": ("server", "path"),
    "GitRepoVolumeSource": ("repository",),
    "EphemeralVolumeSource": ("volumeClaimTemplate",),
    "CSIVolumeSource": ("driver",),
    "FlexVolumeSource": ("driver",),
    "RBDVolumeSource": ("monitors", "image"),
    "CephFSVolumeSource": ("monitors",),
    "CinderVolumeSource": ("volumeID",),
    "GlusterfsVolumeSource": ("endpoints", "path"),
    "QuobyteVolumeSource": ("registry", "volume"),
    "AzureFileVolumeSource": ("secretName", "shareName"),
    "AzureDiskVolumeSource": ("diskName", "diskURI"),
    "GCEPersistentDiskVolumeSource": ("pdName",),
    "AWSElasticBlockStoreVolumeSource": ("volumeID",),
    "PhotonPersistentDiskVolumeSource": ("pdID",),
    "PortworxVolumeSource": ("volumeID",),
    "VsphereVirtualDiskVolumeSource": ("volumePath",),
    "ScaleIOVolumeSource": ("gateway", "system", "volumeName"),
    "StorageOSVolumeSource": ("volumeName",),
    "ISCSIVolumeSource": ("targetPortal", "iqn"),
    "ServiceAccountTokenProjection": ("path",),
    "KeyToPath": ("key", "path"),
    "DownwardAPIVolumeFile": ("path",),
}
"""What may not be empty, by the type of source (validate...VolumeSource)."""
_HOST_PATHS = ("DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice")
_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


_FILE_MODES = ("SecretVolumeSource", "ConfigMapVolumeSource", "DownwardAPIVolumeSource", "ProjectedVolumeSource")
_PROJECTIONS = ("secret", "configMap", "downwardAPI", "serviceAccountToken")
"""Sources that every API server knows. podCertificate and clusterTrustBundle are behind gates, and dropped without."""
_TEN_MINUTES = 600


def _complete(needed: Sequence[str]) -> Check:
    def sources_are_complete(source: Located, pod: PodSeen) -> Iterator[Violation]:
        """The fields without which a source is none."""
        yield from required(source, *needed)

    return sources_are_complete


for _kind, _needed in NEEDED.items():
    of(_kind)(_complete(_needed))


@of("Volume")
def volumes_have_one_source(volume: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateVolumes, validateVolumeSource."""
    yield from required(volume, "name")
    yield from names.label(volume.at("name"), volume.text("name"))
    given = [name for name in (volume.value if isinstance(volume.value, dict) else ()) if volume.get(name) is not None]
    # Without any it is an emptyDir.
    sources = [name for name in given if name != "name"]
    for more in sources[1:]:
        yield Violation(
            volume.at(more), f"is combined with {sources[0]}, but a volume has one source", "keep one of them"
        )


@of("EmptyDirVolumeSource")
def sizes_are_not_negative(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateVolumeSource on emptyDir."""
    limit = source.get("sizeLimit")
    if limit is not None and (known(limit.value) or 0) < 0:
        yield Violation(limit.path, f"{limit.value} is below 0", "must be at least 0")


@of("HostPathVolumeSource")
def host_paths_are_plain(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateHostPathVolumeSource."""
    yield from without_backsteps(source.at("path"), source.text("path"))
    if source.text("type") not in ("", *_HOST_PATHS):
        problem = f'"{source.text("type")}" is not one of {", ".join(_HOST_PATHS)}'
        yield Violation(source.at("type"), problem, "choose one of them")


@of("NFSVolumeSource")
def exports_are_absolute(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateNFSVolumeSource."""
    if source.text("path") and not source.text("path").startswith("/"):
        yield Violation(source.at("path"), "is not an absolute path", "start it with /")


@of("GitRepoVolumeSource")
def checkouts_stay_inside(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateGitRepoVolumeSource."""
    yield from descending(source.at("directory"), source.text("directory"))


@of(*_FILE_MODES)
def modes_of_volumes_are_permissions(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """The mode that files have by default."""
    yield from within(source, "defaultMode", 0, 0o777)


@of("KeyToPath", "DownwardAPIVolumeFile")
def files_stay_inside(file: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateKeyToPath, validateDownwardAPIVolumeFile."""
    yield from file_name(file.at("path"), file.text("path"))
    yield from within(file, "mode", 0, 0o777)


@of("DownwardAPIVolumeFile")
def files_have_one_origin(file: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateDownwardAPIVolumeFile."""
    given = [name for name in ("fieldRef", "resourceFieldRef") if file.get(name) is not None]
    if len(given) != 1:
        yield Violation(file.path, "needs exactly one of fieldRef and resourceFieldRef", "set one")
    yield from pod_field(file.get("fieldRef"), IN_FILES)
    if "fieldRef" not in given:
        yield from amount_field(file.get("resourceFieldRef"), in_file=True)


@of("ProjectedVolumeSource")
def projections_do_not_collide(projected: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateProjectionSources."""
    seen: set[str] = set()
    for source in projected.items("sources"):
        given = [name for name in _PROJECTIONS if source.get(name) is not None]
        for more in given[1:]:
            yield Violation(
                source.at(more),
                f"is combined with {given[0]}, but each source has one kind",
                "make it a separate source",
            )
        for place, path in _projected(source):
            if path in seen:
                yield Violation(place, f'"{path}" is listed twice', "use another path")
            seen.add(path)


def _projected(source: Located) -> Iterator[tuple[str, str]]:
    """The paths of the files that a source makes, but for those of tokens, which Kubernetes doesn't compare."""
    for name in ("secret", "configMap", "downwardAPI"):
        for item in found.items("items") if (found := source.get(name)) is not None else ():
            if item.text("path"):
                yield item.at("path"), item.text("path")


@of("ServiceAccountTokenProjection")
def tokens_last_ten_minutes(token: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateProjectionSources on tokens."""
    yield from within(token, "expirationSeconds", _TEN_MINUTES, 2**32)
    yield from file_name(token.at("path"), token.text("path"))


@of("CSIVolumeSource")
def drivers_have_names(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateCSIVolumeSource, ValidateCSIDriverName."""
    driver = source.text("driver")
    if driver and (len(driver) > 63 or not names.is_subdomain(driver.lower())):
        yield Violation(source.at("driver"), f'"{driver}" is not a driver name', "use at most 63 letters")
    secret = source.get("nodePublishSecretRef")
    if secret is not None:
        yield from required(secret, "name")
        yield from names.subdomain(secret.at("name"), secret.text("name"))


@of("PersistentVolumeClaimTemplate")
def claims_are_sound(template: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidatePersistentVolumeClaimTemplate, ValidatePersistentVolumeClaimSpec."""
    for name in ("name", "namespace", "finalizers"):
        metadata = template.get("metadata")
        if metadata is not None and (metadata.text(name) or metadata.items(name)):
            yield Violation(
                metadata.at(name), "cannot be set", "metadata of a claim can only have labels and annotations"
            )
    spec = template.get("spec")
    if spec is None:
        return
    yield from chosen(spec, "volumeMode")
    modes = [mode for _, mode in spec.texts("accessModes")]
    if not modes:
        yield Violation(spec.at("accessModes"), "is required", f"use one of {', '.join(_MODES)}")
    for path, mode in spec.texts("accessModes"):
        if mode not in _MODES:
            yield Violation(path, f'"{mode}" is not one of {", ".join(_MODES)}', "choose one of them")
    if "ReadWriteOncePod" in modes and set(modes) & set(_MODES[:3]):
        yield Violation(
            spec.at("accessModes"), "ReadWriteOncePod cannot be combined with other modes", "keep one of them"
        )
    resources = spec.get("resources")
    size = resources.entries("requests").get("storage") if resources is not None else None
    if size is None or (known(size.value) or 0) <= 0:
        place = size.path if size is not None else f"{spec.at('resources')}.requests.storage"
        yield Violation(place, "must be more than 0", "set how much is needed")
    for name in ("storageClassName", "volumeAttributesClassName"):
        yield from names.subdomain(spec.at(name), spec.text(name))
    yield from _origin(spec)


def _origin(spec: Located) -> Iterator[Violation]:
    """validateDataSource, validateDataSourceRef."""
    for name in ("dataSource", "dataSourceRef"):
        source = spec.get(name)
        if source is None:
            continue
        yield from required(source, "name", "kind")
        if not source.text("apiGroup") and source.text("kind") != "PersistentVolumeClaim":
            yield Violation(source.at("kind"), "must be PersistentVolumeClaim without an apiGroup", "set the group")
        yield from names.subdomain(source.at("apiGroup"), source.text("apiGroup"))
        yield from names.label(source.at("namespace"), source.text("namespace"))
    one, other = spec.get("dataSource"), spec.get("dataSourceRef")
    if one is not None and other is not None:
        differ = any(one.text(name) != other.text(name) for name in ("apiGroup", "kind", "name"))
        if differ or other.text("namespace"):
            yield Violation(one.path, "differs from dataSourceRef", "keep one of them")
