"""Sound parts of jobs, from which malformed ones are made: kinds of training, and what a pod may hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

Document = dict[str, Any]

WHOLE: Document = {
    "model": {"random": {"tokenizer": {"characters": "0123456789+="}, "contextLength": 64}},
    "data": {"train": {"task": {"type": "addition"}}, "maxPromptTokens": 16, "prompt": "question", "answer": "answer"},
    "reward": {"functions": [{"type": "exactMatch"}]},
    "algorithm": {"preset": "grpo"},
    # So every role has pods of its own.
    "placement": "separate",
    "rollout": {"engine": "torch", "maxResponseTokens": 8},
    "stop": {"steps": 10},
}
KINDS: Sequence[Document] = (
    {},
    {"algorithm": {"preset": "ppo", "critic": {"warmupSteps": 2}}},
    {"reward": {"functions": [{"type": "pattern", "pattern": "[0-9]+"}, {"type": "length", "weight": -0.1}]}},
    {"data": {"prompt": "Add: {question}=", "validation": [{"name": "held-out", "task": {"type": "addition"}}]}},
    {"data": {"train": {"task": None, "parts": [{"name": "a", "task": {"type": "copy"}}, {"name": "b", "task": {"type": "addition"}}]}}},
    {"reward": {"functions": [{"type": "exactMatch", "params": {"partial": True}}], "clip": {"low": 0, "high": 1}}},
    {"pipeline": {"mode": "fullyAsync", "staleness": {"maxAge": 2}}, "batch": {"miniBatchGroups": 8}},
    {"batch": {"groups": 32, "samplesPerPrompt": 4, "miniBatchGroups": 16}, "trainer": {"replicas": 2}},
    {"checkpoint": {"uri": "pvc://state/jobs", "every": 5}, "code": [{"configMap": "rewards"}, {"pvc": "code", "path": "src"}]},
    {"image": "example.com:5000/rl/trainer:1.2", "queueName": "team", "retry": {"limit": 3}},
    {"rollout": {"replicas": 2, "gpusPerReplica": 1, "env": {"LEVEL": "info"}}, "trainer": {"gpusPerReplica": 2}},
    {"deadlines": {"runSeconds": 86400}, "logging": {"samplesEvery": 5}, "validation": {}, "seed": 7},
)  # fmt: skip
"""Laid over `WHOLE`, one or two at a time."""

SETTINGS: Mapping[str, Sequence[Any]] = {
    "resources": (
        {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}},
        {"limits": {"cpu": "500m", "example.com/nic": 1}},
        {"requests": {"memory": "1Gi", "ephemeral-storage": "10Gi"}},
        {"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi"}, "requests": {"hugepages-2Mi": "4Mi"}},
    ),
    "sharedMemory": ("256Mi",),
    "nodeSelector": ({"disk": "fast", "example.com/rack": "a1"},),
    "tolerations": (
        [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        [{"key": "dedicated", "value": "rl"}, {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 9}],
    ),
    "affinity": (
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}, {"key": "gpu", "operator": "Exists"}]},
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]},
        ]}}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 10, "preference": {"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["8"]}]}}
        ]}},
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "namespaces": ["default"], "labelSelector": {"matchLabels": {"app": "x"}}}
        ]}},
        {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 5, "podAffinityTerm": {"topologyKey": "zone", "matchLabelKeys": ["rev"], "namespaceSelector": {},
             "labelSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["y"]}]}}}
        ]}},
    ),
    "topologySpreadConstraints": (
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2,
          "labelSelector": {"matchLabels": {"app": "x"}}, "matchLabelKeys": ["rev"]}],
        [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "nodeTaintsPolicy": "Honor"},
         {"maxSkew": 1, "topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "nodeAffinityPolicy": "Ignore"}],
    ),
    "env": (
        [{"name": "MODE", "value": "fast"}, {"name": "EMPTY"}],
        [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        [{"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}}],
        [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}}}],
        [{"name": "LEVEL2", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "level"}}}],
    ),
    "labels": ({"team": "rl"}, {"example.com/team": "a", "app": "x"}),
    "annotations": ({"example.com/note": "anything at all: {}"},),
    "priorityClassName": ("high",),
    "runtimeClassName": ("nvidia",),
    "serviceAccountName": ("trainer",),
    "imagePullSecrets": ([{"name": "registry"}, {"name": "mirror"}],),
}  # fmt: skip
"""What the pod settings of the job file may hold, by field."""

VOLUMES: Sequence[Document] = (
    {"emptyDir": {}},
    {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    {"configMap": {"name": "settings", "items": [{"key": "a", "path": "dir/a"}], "defaultMode": 420}},
    {"secret": {"secretName": "hub", "items": [{"key": "token", "path": "token", "mode": 256}]}},
    {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
    {"hostPath": {"path": "/data", "type": "Directory"}},
    {"nfs": {"server": "files.example.com", "path": "/export", "readOnly": True}},
    {"csi": {"driver": "csi.example.com", "volumeAttributes": {"a": "b"}, "nodePublishSecretRef": {"name": "s"}}},
    {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    {"downwardAPI": {"items": [{"path": "cpu", "resourceFieldRef": {"containerName": "ray", "resource": "limits.cpu", "divisor": "1m"}}]}},
    {"projected": {"sources": [{"secret": {"name": "a", "items": [{"key": "k", "path": "k"}]}}, {"configMap": {"name": "b"}}]}},
    {"projected": {"sources": [{"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}]}},
    {"ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": "10Gi"}}}}}},
    {"image": {"reference": "example.com/models/tiny:1", "pullPolicy": "IfNotPresent"}},
)  # fmt: skip
"""Sources of volumes."""

POD: Mapping[str, Sequence[Any]] = {
    "hostname": ("worker",),
    "subdomain": ("pool",),
    "schedulerName": ("default-scheduler",),
    "terminationGracePeriodSeconds": (0, 30),
    "activeDeadlineSeconds": (3600,),
    "dnsPolicy": ("ClusterFirst",),
    "dnsConfig": ({"nameservers": ["10.0.0.10"], "searches": ["example.com"], "options": [{"name": "ndots", "value": "2"}]},),
    "hostAliases": ([{"ip": "10.1.2.3", "hostnames": ["hub.example.com", "mirror"]}],),
    "securityContext": (
        {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "supplementalGroups": [2000], "fsGroupChangePolicy": "OnRootMismatch"},
        {"seccompProfile": {"type": "Localhost", "localhostProfile": "profiles/a.json"}, "sysctls": [{"name": "net.core.somaxconn", "value": "1024"}]},
        {"appArmorProfile": {"type": "RuntimeDefault"}, "supplementalGroupsPolicy": "Merge", "seLinuxOptions": {"level": "s0:c1"}},
    ),
    "tolerations": ([{"key": "spot", "operator": "Exists"}],),
    "nodeSelector": ({"arch": "x"},),
    "readinessGates": ([{"conditionType": "example.com/ready"}],),
    "schedulingGates": ([{"name": "example.com/gate"}],),
    "resourceClaims": ([{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],),
    "preemptionPolicy": ("Never",),
    "enableServiceLinks": (True,),
    "overhead": ({"cpu": "100m"},),
    "os": ({"name": "linux"},),
    "volumes": ([{"name": "extra", "emptyDir": {}}],),
    "topologySpreadConstraints": ([{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}],),
}  # fmt: skip
"""What `spec` of a pod template may hold besides containers."""

RAY: Mapping[str, Sequence[Any]] = {
    "workingDir": ("/work",),
    "imagePullPolicy": ("Always",),
    "env": ([{"name": "FROM_TEMPLATE", "value": "1"}, {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            [{"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}}]),
    "envFrom": ([{"prefix": "HUB_", "secretRef": {"name": "hub"}}, {"configMapRef": {"name": "settings", "optional": True}}],),
    "resources": ({"requests": {"cpu": "250m"}},),
    "securityContext": ({"readOnlyRootFilesystem": True, "runAsUser": 1000, "capabilities": {"add": ["IPC_LOCK"]}},
                        {"seccompProfile": {"type": "RuntimeDefault"}, "procMount": "Default"}),
    "terminationMessagePolicy": ("FallbackToLogsOnError",),
    "terminationMessagePath": ("/dev/termination-log",),
    "stdin": (True,),
    "volumeMounts": ([{"name": "scratch", "mountPath": "/in-template", "subPathExpr": "$(POD_IP)", "readOnly": True}],),
    "resizePolicy": ([{"resourceName": "cpu", "restartPolicy": "NotRequired"}],),
}  # fmt: skip
"""What a template may say of Ray's own container."""

SIDECAR: Mapping[str, Sequence[Any]] = {
    "command": (["sleep", "1d"],),
    "args": (["-v"],),
    "ports": ([{"name": "http", "containerPort": 8000}, {"containerPort": 8000, "protocol": "UDP", "hostPort": 9000}],),
    "livenessProbe": ({"httpGet": {"path": "/healthz", "port": 8000, "httpHeaders": [{"name": "X-A", "value": "b"}]}, "periodSeconds": 5},),
    "readinessProbe": ({"exec": {"command": ["true"]}, "successThreshold": 2},),
    "startupProbe": ({"tcpSocket": {"port": "http"}, "failureThreshold": 30, "terminationGracePeriodSeconds": 5},),
    "lifecycle": ({"preStop": {"sleep": {"seconds": 2}}, "postStart": {"exec": {"command": ["true"]}}},),
    "resources": ({"requests": {"cpu": "10m"}, "limits": {"memory": "64Mi"}},),
    "securityContext": ({"runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},),
    "env": ([{"name": "A", "value": "b"}],),
    "volumeMounts": ([{"name": "scratch", "mountPath": "/scratch", "mountPropagation": "HostToContainer"}],),
}  # fmt: skip
"""What a further container may hold."""


def sound_job(dice: random.Random) -> Document:
    """A job with nothing wrong in it, or so it is meant."""
    spec = copy.deepcopy(WHOLE)
    for kind in dice.sample(KINDS, dice.choice([1, 1, 2])):
        _lay_over(spec, copy.deepcopy(kind))
    for role in ("rollout", "trainer", "head"):
        if dice.random() < 0.6:
            spec.setdefault(role, {})["pod"] = _pod(dice)
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny", "namespace": "default", "labels": {"team": "rl"}},
        "spec": spec,
    }


def _pod(dice: random.Random) -> Document:
    """Pod settings, often with volumes, sometimes with a template."""
    pod = _some(SETTINGS, dice, 3)
    if dice.random() < 0.5:
        sources = dice.sample(VOLUMES, dice.choice([1, 2]))
        pod["volumes"] = [
            {"name": name, **copy.deepcopy(source)} for name, source in zip(("scratch", "more"), sources, strict=False)
        ]
        pod["volumeMounts"] = [
            {"name": volume["name"], "mountPath": path, **dice.choice(({}, {"readOnly": True}, {"subPath": "a/b"}))}
            for volume, path in zip(pod["volumes"], ("/scratch", "/more/data"), strict=False)
        ]
    if dice.random() < 0.5:
        pod["template"] = _template(dice, "volumes" in pod)
    return pod


def _template(dice: random.Random, has_volumes: bool) -> Document:
    spec = _some(POD, dice, 2)
    containers = []
    if dice.random() < 0.5:
        containers.append({"name": "ray", **_some(RAY, dice, 2)})
    if dice.random() < 0.4:
        containers.append({"name": "beside", "image": "busybox:1", **_some(SIDECAR, dice, 3)})
    for container in containers:
        if not has_volumes:
            container.pop("volumeMounts", None)
    if containers:
        spec["containers"] = containers
    template: Document = {"spec": spec}
    if dice.random() < 0.3:
        template["metadata"] = {"labels": {"from": "template"}, "annotations": {"example.com/from": "template"}}
    return template


def _some(choices: Mapping[str, Sequence[Any]], dice: random.Random, most: int) -> Document:
    names = dice.sample(sorted(choices), dice.randint(1, most))
    return {name: copy.deepcopy(dice.choice(choices[name])) for name in names}


def _lay_over(base: Document, more: Document) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _lay_over(base[name], value)
        elif value is None:
            base.pop(name, None)
        else:
            base[name] = value
