"""Containers besides Ray's: images, ports, probes, what is done at their start and end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.registry import PodSeen, of, required, within
from rljob_api.violations import Violation

_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc", "sleep")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_POLICIES = ("Always", "Never", "OnFailure")


@of("Container")
def containers_have_name_and_image(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateContainerCommon."""
    yield from required(container, "name", "image")
    yield from names.label(container.at("name"), container.text("name"))


@of("Container")
def ports_are_sound(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateContainerPorts."""
    seen: set[str] = set()
    for port in container.items("ports"):
        name = port.text("name")
        if name:
            yield from names.port(port.at("name"), name)
            if name in seen:
                yield Violation(port.at("name"), f'"{name}" is listed twice', "keep one of them")
            seen.add(name)
        yield from within(port, "containerPort", 1, 65535)
        if port.number("hostPort") != 0:
            yield from within(port, "hostPort", 1, 65535)


@of("PodSpec")
def host_ports_are_taken_once(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """AccumulateUniqueHostPorts: over all containers."""
    seen: set[tuple[str, str, int]] = set()
    for container in spec.items("containers"):
        for port in container.items("ports"):
            number = port.number("hostPort")
            taken = (port.text("protocol") or "TCP", port.text("hostIP"), number or 0)
            if number and taken in seen:
                yield Violation(port.at("hostPort"), f"{number} is listed twice", "use another port")
            seen.add(taken)


@of("Container")
def probes_are_sound(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateProbe and those of each kind."""
    for name in _PROBES:
        probe = container.get(name)
        if probe is None:
            continue
        yield from _handler(probe, pod)
        for field in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
            yield from within(probe, field, 0)
        seconds, needed = probe.get("terminationGracePeriodSeconds"), probe.number("successThreshold")
        yield from within(probe, "terminationGracePeriodSeconds", 1)
        if name == "readinessProbe" and seconds is not None:
            yield Violation(seconds.path, "readiness probes do not terminate containers", "remove it")
        if name != "readinessProbe" and needed not in (None, 0, 1):
            yield Violation(probe.at("successThreshold"), f"must be 1 in a {name}", "remove it")


@of("Container")
def hooks_are_sound(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateLifecycle. Its stopSignal is behind a gate, and dropped without."""
    lifecycle = container.get("lifecycle")
    if lifecycle is None:
        return
    for name in ("postStart", "preStop"):
        hook = lifecycle.get(name)
        if hook is not None:
            yield from _handler(hook, pod)


def _handler(node: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateHandler."""
    given = [name for name in _HANDLERS if node.get(name) is not None]
    if not given:
        yield Violation(node.path, "has no handler", f"add one of {', '.join(_HANDLERS[:4])}")
    for more in given[1:]:
        yield Violation(node.at(more), f"is combined with {given[0]}, but there can only be one", "keep one of them")
    handler = node.get(given[0]) if given else None
    if handler is None:
        return
    if given[0] == "exec":
        yield from required(handler, "command")
    elif given[0] == "sleep":
        yield from within(handler, "seconds", 0, pod.grace_seconds)
    else:
        port = handler.get("port")
        yield from names.port(handler.at("port"), port.value if port is not None else 0)
    if given[0] == "httpGet":
        for header in handler.items("httpHeaders"):
            if not re.fullmatch(r"[-A-Za-z0-9]+", header.text("name")):
                yield Violation(header.at("name"), f'"{header.text("name")}" is not a header name', "use letters and -")


@of("Container")
def restarts_are_ruled(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateContainerRestartPolicy."""
    rules, policy = container.items("restartPolicyRules"), container.get("restartPolicy")
    if policy is None:
        if rules:
            yield Violation(container.at("restartPolicy"), "is required with restartPolicyRules", "add it")
    elif container.text("restartPolicy") not in _POLICIES:
        yield Violation(policy.path, f"is not one of {', '.join(_POLICIES)}", "choose one of them")
    if len(rules) > 20:
        yield Violation(container.at("restartPolicyRules"), f"has {len(rules)} items", "use at most 20")
    for rule in rules:
        if rule.text("action") != "Restart":
            yield Violation(rule.at("action"), f'"{rule.text("action")}" is not Restart', "write Restart")
        codes = rule.get("exitCodes")
        if codes is None:
            yield Violation(rule.at("exitCodes"), "is required", "add it")
        else:
            if codes.text("operator") not in ("In", "NotIn"):
                yield Violation(codes.at("operator"), "is not one of In, NotIn", "choose one of them")
            if len(codes.items("values")) > 255:
                yield Violation(codes.at("values"), "has too many items", "use at most 255")
