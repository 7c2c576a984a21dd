"""Pod settings of the pools and the head. They matter on a cluster only; `rljob run` ignores them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import (
    DnsLabel,
    DnsName,
    EnvName,
    FreeForm,
    LabelKey,
    LabelValue,
    Listed,
    MapKeys,
    NullIsAbsent,
    Quantity,
    ShortText,
    SpecModel,
)

ResourceMap = Annotated[dict[LabelKey, Quantity], Field(max_length=32), NullIsAbsent]
AnnotationMap = Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=64), NullIsAbsent]
LabelMap = Annotated[dict[LabelKey, LabelValue], Field(max_length=64), NullIsAbsent]


class Resources(SpecModel):
    """Resources of the Ray container. GPUs come from gpusPerReplica."""

    requests: ResourceMap = Field(default={}, description="E.g. {cpu: 8, memory: 64Gi}.")
    limits: ResourceMap = Field(default={}, description="Upper limits.")


class Toleration(SpecModel):
    """A taint that the pod tolerates."""

    key: Annotated[str, Field(max_length=317)] | None = Field(default=None, description="Taint key. Default: all.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How to compare.")
    value: LabelValue | None = Field(default=None, description="Taint value (operator Equal).")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Taint effect. Default: all."
    )
    toleration_seconds: int | None = Field(default=None, ge=0, le=315360000, description="NoExecute. Default: forever.")


class KeyReference(SpecModel):
    """One of its keys."""

    name: DnsName = Field(description="Its name.")
    key: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Key in it.")
    optional: bool = Field(default=False, description="May be missing.")


class FieldReference(SpecModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Such as status.podIP.")


class EnvSource(SpecModel):
    """Exactly one field."""

    secret_key_ref: KeyReference | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeyReference | None = Field(default=None, description="A key of a ConfigMap.")
    field_ref: FieldReference | None = Field(default=None, description="A field of the pod.")


class EnvVar(SpecModel):
    """An environment variable. Secrets only by reference."""

    name: EnvName = Field(description="Its name.")
    value: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="Its value.")
    value_from: EnvSource | None = Field(default=None, description="Source of the value.")


class VolumeMount(SpecModel):
    """A volume mount."""

    name: DnsLabel = Field(description="Its name.")
    mount_path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/[^:]*$")] = Field(
        description="Absolute path."
    )
    sub_path: Annotated[str, Field(max_length=1024)] | None = Field(default=None, description="Folder in the volume.")
    read_only: bool = Field(default=False, description="Refuse writes.")


class LocalReference(SpecModel):
    """An object in the namespace."""

    name: DnsName = Field(description="Its name.")


class Topology(SpecModel):
    """Kueue's topology-aware scheduling."""

    mode: Literal["required", "preferred"] = Field(description="Wait for such a place, or not.")
    level: Annotated[str, Field(min_length=1, max_length=317)] = Field(
        description="Such as topology.kubernetes.io/zone."
    )


class Pod(SpecModel):
    """Settings of a pool's pods."""

    resources: Resources = Field(default=Resources(), description="CPU, memory and others.")
    gpu_resource: LabelKey = Field(default="nvidia.com/gpu", description="What gpusPerReplica counts.")
    shared_memory: Quantity | None = Field(
        default=None, description="/dev/shm, within the memory limit. Default: 30 % of it."
    )
    node_selector: LabelMap = Field(default={}, description="Labels a node must have.")
    tolerations: Annotated[Listed[Toleration], Field(max_length=32)] = Field(
        default=(), description="Tolerated taints."
    )
    affinity: FreeForm = Field(default={}, description="As a pod's affinity.")
    topology_spread_constraints: Annotated[Listed[FreeForm], Field(max_length=8)] = Field(
        default=(), description="As a pod's topologySpreadConstraints."
    )
    topology: Topology | None = Field(default=None, description="Proximity; needs queueName.")
    env: Annotated[Listed[EnvVar], Field(max_length=64), MapKeys(("name",))] = Field(
        default=(), description="Environment variables."
    )
    volumes: Annotated[Listed[FreeForm], Field(max_length=32), MapKeys(("name",))] = Field(
        default=(), description="As a pod's volumes."
    )
    volume_mounts: Annotated[Listed[VolumeMount], Field(max_length=64), MapKeys(("mountPath",))] = Field(
        default=(), description="Volume mounts."
    )
    labels: LabelMap = Field(default={}, description="Extra labels.")
    annotations: AnnotationMap = Field(default={}, description="Extra annotations.")
    priority_class_name: DnsName | None = Field(default=None, description="Priority class.")
    runtime_class_name: DnsName | None = Field(default=None, description="Runtime class.")
    service_account_name: DnsName | None = Field(
        default=None, description="Its token is never mounted. Default: the namespace's."
    )
    image_pull_secrets: Annotated[Listed[LocalReference], Field(max_length=8), MapKeys(("name",))] = Field(
        default=(), description="To pull the image."
    )
    template: FreeForm = Field(
        default={},
        description="Pod template, merged over all this. Not for Ray's command, ports, restartPolicy or token.",
    )


class HeadPod(SpecModel):
    """The head: driver and Ray's own services, no GPU."""

    pod: Pod = Field(default=Pod(), description="Settings of the head pod.")


class Code(SpecModel):
    """Your Python files, mounted read-only on PYTHONPATH. Set exactly one of configMap and pvc."""

    config_map: DnsName | None = Field(default=None, description="ConfigMap whose keys are file names.")
    pvc: DnsName | None = Field(default=None, description="PersistentVolumeClaim with the files.")
    path: ShortText | None = Field(default=None, description="pvc: folder in the volume. Default: its root.")
