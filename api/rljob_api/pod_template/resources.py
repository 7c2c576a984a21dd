"""CPU, memory and other resources: their names, their amounts, and requests within limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.quantities import known
from rljob_api.pod_template.registry import PodSeen, of
from rljob_api.violations import Violation

_STANDARD = ("cpu", "memory", "ephemeral-storage")
_HUGE = "hugepages-"


@of("Container")
def containers_have_sound_resources(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateContainerResourceRequirements."""
    resources = container.get("resources")
    if resources is None:
        return
    yield from _amounts(resources, in_container=True)
    yield from _claims(resources, pod)


@of("PodSpec")
def pods_have_sound_resources(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """validatePodResources: limits of the pod as a whole hold those of its containers."""
    resources = spec.get("resources")
    if resources is None:
        return
    if resources.get("claims") is not None:
        yield Violation(resources.at("claims"), "claims belong to containers", "move it to a container")
    yield from _amounts(resources, in_container=False)
    yield from _containers_fit(spec, resources)


def _amounts(resources: Located, *, in_container: bool) -> Iterator[Violation]:
    """validateResourceRequirements."""
    limits, requests = resources.entries("limits"), resources.entries("requests")
    for amounts in (limits, requests):
        for name, amount in amounts.items():
            yield from _name(amount.path, name, in_container=in_container)
            yield from _amount(amount, name)
    for name, amount in requests.items():
        limit = limits.get(name)
        exact = not _overcommits(name)
        if limit is None:
            if exact and in_container:
                yield Violation(
                    resources.at("limits"),
                    f"{name} cannot be overcommitted and needs a limit",
                    f"set it to {amount.value}",
                )
            continue
        asked, most = known(amount.value), known(limit.value)
        if asked is None or most is None or _milli(asked) == _milli(most):
            continue
        if exact:
            yield Violation(
                amount.path, f"is {amount.value}, but the limit of {name} is {limit.value}", "make them equal"
            )
        elif _milli(asked) > _milli(most):
            yield Violation(
                amount.path, f"{amount.value} is more than the limit of {limit.value}", "lower it, or raise the limit"
            )
    every = {**requests, **limits}
    huge = [entry for name, entry in every.items() if name.startswith(_HUGE)]
    if huge and not every.keys() & {"cpu", "memory"}:
        yield Violation(huge[0].path, "huge pages need cpu or memory too", "also set one of them")


def _name(path: str, name: str, *, in_container: bool) -> Iterator[Violation]:
    """validateContainerResourceName, validatePodResourceName."""
    if not names.is_qualified(name):
        yield from names.qualified(path, name)
    elif not in_container and name not in ("cpu", "memory") and not name.startswith(_HUGE):
        yield Violation(path, f"{name} cannot be set for the pod as a whole", "set it on a container")
    elif "/" not in name and name not in _STANDARD and not name.startswith(_HUGE):
        yield Violation(
            path, f"there is no resource {name}", f"use one of {', '.join(_STANDARD)}, or a name with a domain"
        )
    elif "/" in name and "kubernetes.io/" not in name and not _is_extended(name):
        yield Violation(path, f"{name} is not a valid resource name", "use a shorter one, without requests.")


def _is_extended(name: str) -> bool:
    return (
        "/" in name
        and "kubernetes.io/" not in name
        and not name.startswith("requests.")
        and names.is_qualified(f"requests.{name}")
    )


def _overcommits(name: str) -> bool:
    """Whether containers may ask for less than they may use."""
    return ("/" not in name or "kubernetes.io/" in name) and not name.startswith(_HUGE)


def _amount(amount: Located, name: str) -> Iterator[Violation]:
    """ValidateResourceQuantityValue, validateResourceQuantityHugePageValue."""
    value = known(amount.value)
    if value is None:
        return
    if value < 0:
        yield Violation(amount.path, f"{amount.value} is below 0", "must be at least 0")
    if _is_extended(name) and _milli(value) % 1000:
        yield Violation(amount.path, f"{amount.value} is not a whole number", f"{name} cannot be divided")
    if name.startswith(_HUGE):
        page = known(name.removeprefix(_HUGE))
        if page is None or page <= 0 or _milli(page) % 1000 or math.ceil(value) % math.ceil(page):
            yield Violation(amount.path, f"{amount.value} is not a multiple of {name}", "use whole pages")


def _milli(value: Fraction) -> int:
    """The quantity in thousandths, rounded away from zero, as Kubernetes counts."""
    return math.ceil(value * 1000) if value >= 0 else math.floor(value * 1000)


def _claims(resources: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateResourceClaimNames."""
    seen: set[str] = set()
    for claim in resources.items("claims"):
        name, request = claim.text("name"), claim.text("request")
        key = f"{name}/{request}" if request else name
        if not name:
            yield Violation(claim.at("name"), "is required", "add it")
            continue
        whole = request == "" and any(other.partition("/")[0] == name for other in seen)
        if name in seen or key in seen or whole:
            yield Violation(claim.path, f'"{key}" is listed twice', "keep one of them")
        yield from names.label(claim.at("request"), request)
        seen.add(key)
        if name not in pod.claims:
            yield Violation(claim.path, f'the pod has no resource claim "{name}"', "add it to spec.resourceClaims")


def _containers_fit(spec: Located, resources: Located) -> Iterator[Violation]:
    """validatePodResourceConsistency."""
    containers = [found for item in spec.items("containers") if (found := item.get("resources")) is not None]
    for name, whole in resources.entries("requests").items():
        asked = [_requested(found, name) for found in containers]
        value = known(whole.value)
        if value is not None and sum(asked) > value:
            yield Violation(whole.path, f"{whole.value} is less than the containers request", "raise it")
    for name, whole in resources.entries("limits").items():
        value, parts = known(whole.value), [_limit(found, name) for found in containers]
        if value is None:
            continue
        if max(parts, default=0) > value or (name.startswith(_HUGE) and sum(parts) > value):
            yield Violation(whole.path, f"{whole.value} is less than a container's limit", "raise it")


def _requested(resources: Located, name: str) -> Fraction:
    """What a container asks for: its limit, if it says nothing else."""
    entries: Mapping[str, Located] = {**resources.entries("limits"), **resources.entries("requests")}
    return (known(entries[name].value) if name in entries else None) or Fraction(0)


def _limit(resources: Located, name: str) -> Fraction:
    entries = resources.entries("limits")
    return (known(entries[name].value) if name in entries else None) or Fraction(0)


@of("PodSpec")
def overhead_is_sound(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateOverhead: as limits are."""
    for name, amount in spec.entries("overhead").items():
        yield from _name(amount.path, name, in_container=True)
        yield from _amount(amount, name)


@of("PodSpec")
def resource_claims_are_named(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """validatePodResourceClaims."""
    for claim in spec.items("resourceClaims"):
        yield from names.label(claim.at("name"), claim.text("name"))
        sources = [name for name in ("resourceClaimName", "resourceClaimTemplateName") if claim.get(name) is not None]
        if len(sources) != 1:
            problem = "needs exactly one of resourceClaimName and resourceClaimTemplateName"
            yield Violation(claim.path, problem, "set one")
        for name in sources:
            if not names.is_subdomain(claim.text(name)):
                yield Violation(claim.at(name), "is not an object name", "write it in lower case")


@of("Container")
def pods_are_resized_without_a_restart(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateResizePolicy: a container of a pod that never restarts cannot be restarted to be resized."""
    seen: set[str] = set()
    for policy in container.items("resizePolicy"):
        name = policy.text("resourceName")
        if name not in ("cpu", "memory"):
            yield Violation(policy.at("resourceName"), f'"{name}" cannot be resized', "use cpu or memory")
        elif name in seen:
            yield Violation(policy.at("resourceName"), f"{name} is listed twice", "keep one of them")
        seen.add(name)
        if policy.text("restartPolicy") != "NotRequired":
            yield Violation(policy.at("restartPolicy"), "a job's pods are never restarted", "write NotRequired")
