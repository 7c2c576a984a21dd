"""Which nodes a pod may run on: affinity, spread, tolerations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.registry import PodSeen, chosen, of, required, within
from rljob_api.violations import Violation

_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


@of("NodeSelector")
def node_selectors_have_terms(selector: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateNodeSelector. Values that no label has are refused here, and let through in what is only preferred."""
    if not selector.items("nodeSelectorTerms"):
        yield Violation(selector.at("nodeSelectorTerms"), "is empty", "add a term, or remove the requirement")
    for term in selector.items("nodeSelectorTerms"):
        for requirement in term.items("matchExpressions"):
            for path, value in requirement.texts("values"):
                yield from names.label_value(path, value)


@of("NodeSelectorTerm")
def node_requirements_are_sound(term: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateNodeSelectorRequirement, ValidateNodeFieldSelectorRequirement."""
    for requirement in term.items("matchExpressions"):
        operator, values = requirement.text("operator"), requirement.items("values")
        yield from names.qualified(requirement.at("key"), requirement.text("key"))
        if operator in ("Gt", "Lt"):
            if len(values) != 1:
                yield Violation(requirement.at("values"), f"{operator} takes exactly one value", "write one number")
        else:
            yield from _operator(requirement)
    for requirement in term.items("matchFields"):
        operator, values = requirement.text("operator"), requirement.items("values")
        if requirement.text("key") != "metadata.name":
            yield Violation(requirement.at("key"), "is not a node field", "use metadata.name, or matchExpressions")
        if operator not in ("In", "NotIn"):
            yield Violation(requirement.at("operator"), f'"{operator}" is not one of In, NotIn', "choose one of them")
        elif len(values) != 1:
            yield Violation(requirement.at("values"), "must be a single name", "write one")
        for path, value in requirement.texts("values"):
            if not names.is_subdomain(value):
                yield Violation(path, f'"{value}" is not a node name', "write it in lower case")


def _operator(requirement: Located) -> Iterator[Violation]:
    """The operator of a requirement on labels, and the values that it needs or must not have."""
    operator, values = requirement.text("operator"), requirement.items("values")
    if operator not in _OPERATORS:
        problem = f'"{operator}" is not one of {", ".join(_OPERATORS)}'
        yield Violation(requirement.at("operator"), problem, "choose one of them")
    elif operator in ("In", "NotIn") and not values:
        yield Violation(requirement.at("values"), f"is required by {operator}", "add the values")
    elif operator in ("Exists", "DoesNotExist") and values:
        yield Violation(requirement.at("values"), f"has no effect with {operator}", "remove it")


@of("LabelSelector")
def label_selectors_are_sound(selector: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateLabelSelector."""
    yield from labels(selector, "matchLabels")
    for requirement in selector.items("matchExpressions"):
        yield from names.qualified(requirement.at("key"), requirement.text("key"))
        yield from _operator(requirement)
        for path, value in requirement.texts("values"):
            yield from names.label_value(path, value)


def labels(node: Located, name: str) -> Iterator[Violation]:
    """ValidateLabels."""
    for key, value in node.entries(name).items():
        yield from names.qualified(value.path, key)
        if isinstance(value.value, str):
            yield from names.label_value(value.path, value.value)


@of("PreferredSchedulingTerm", "WeightedPodAffinityTerm")
def weights_are_percentages(term: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidatePreferredSchedulingTerms, validateWeightedPodAffinityTerms."""
    yield from within(term, "weight", 1, 100)


@of("PodAffinityTerm")
def pod_affinity_has_a_topology(term: Located, pod: PodSeen) -> Iterator[Violation]:
    """validatePodAffinityTerm."""
    yield from names.qualified(term.at("topologyKey"), term.text("topologyKey"))
    for path, name in term.texts("namespaces"):
        if not names.is_label(name):
            yield Violation(path, f'"{name}" is not a namespace name', "write it in lower case")
    yield from _label_keys(term)


def _label_keys(term: Located) -> Iterator[Violation]:
    """ValidateMatchLabelKeysAndMismatchLabelKeys."""
    selector = term.get("labelSelector")
    matched, others = dict(term.texts("matchLabelKeys")), dict(term.texts("mismatchLabelKeys"))
    for name, keys in (("matchLabelKeys", matched), ("mismatchLabelKeys", others)):
        if keys and selector is None:
            yield Violation(term.at(name), "applies only together with labelSelector", "add one, or remove it")
        elif keys:
            for path, key in keys.items():
                yield from names.qualified(path, key)
    # The selector may have a key once: what is written in it and what comes from matchLabelKeys would be two.
    seen = set(selector.entries("matchLabels")) if selector is not None else set()
    for requirement in selector.items("matchExpressions") if selector is not None else ():
        key = requirement.text("key")
        if key in matched.values() and key in seen:
            yield Violation(term.at("matchLabelKeys"), f'"{key}" is also in labelSelector', "keep one of them")
        seen.add(key)
    for path, key in matched.items():
        if key in others.values():
            yield Violation(path, f'"{key}" is also in mismatchLabelKeys', "keep one of them")


@of("TopologySpreadConstraint")
def spread_is_sound(constraint: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateTopologySpreadConstraints."""
    yield from within(constraint, "maxSkew", 1)
    yield from required(constraint, "topologyKey", "whenUnsatisfiable")
    yield from within(constraint, "minDomains", 1)
    if constraint.number("minDomains") is not None and constraint.text("whenUnsatisfiable") != "DoNotSchedule":
        yield Violation(constraint.at("minDomains"), "applies only to whenUnsatisfiable: DoNotSchedule", "set it")
    for name in ("nodeAffinityPolicy", "nodeTaintsPolicy"):
        yield from chosen(constraint, name)
    yield from _label_keys(constraint)


@of("PodSpec")
def node_selectors_are_labels(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidatePodSpec on nodeSelector and tolerations."""
    yield from labels(spec, "nodeSelector")


@of("Toleration")
def tolerations_are_sound(toleration: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateTolerations. Gt and Lt are behind a gate that is closed by default."""
    key, operator, value = (toleration.text(name) for name in ("key", "operator", "value"))
    if key:
        yield from names.qualified(toleration.at("key"), key)
    elif operator != "Exists":
        yield Violation(toleration.at("key"), "is required by operator Equal", "add it, or use operator: Exists")
    if toleration.number("tolerationSeconds") is not None and toleration.text("effect") != "NoExecute":
        yield Violation(toleration.at("tolerationSeconds"), "applies only to effect NoExecute", "set effect: NoExecute")
    if operator == "Exists":
        if value:
            yield Violation(toleration.at("value"), "has no effect with operator Exists", "remove it")
    elif operator in ("", "Equal"):
        yield from names.label_value(toleration.at("value"), value)
    elif operator in ("Gt", "Lt"):
        yield Violation(toleration.at("operator"), f"{operator} is not enabled in Kubernetes", "use Equal or Exists")


@of("PodSpec")
def gates_and_conditions_have_names(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateReadinessGates, validateSchedulingGates."""
    for gate in spec.items("readinessGates"):
        yield from names.qualified(gate.at("conditionType"), gate.text("conditionType"))
    for gate in spec.items("schedulingGates"):
        yield from names.qualified(gate.at("name"), gate.text("name"))


@of("PodSpec")
def names_of_the_pod_are_sound(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidatePodSpec: names of other objects, of the host, and numbers of seconds."""
    for name in ("hostname", "subdomain"):
        yield from names.label(spec.at(name), spec.text(name))
    for name in ("serviceAccountName", "priorityClassName", "nodeName"):
        yield from names.subdomain(spec.at(name), spec.text(name))
    if not spec.text("serviceAccountName"):
        yield from names.subdomain(spec.at("serviceAccount"), spec.text("serviceAccount"))
    yield from chosen(spec, "preemptionPolicy")
    for name in ("runtimeClassName", "hostnameOverride"):
        if spec.get(name) is not None and not names.is_subdomain(spec.text(name)):
            yield Violation(
                spec.at(name), f'"{spec.text(name)}" does not have the right form', "write it in lower case"
            )
    if spec.get("hostnameOverride") is not None:
        if len(spec.text("hostnameOverride")) > 64:
            yield Violation(spec.at("hostnameOverride"), "is too long", "use at most 64 characters")
        for other in ("setHostnameAsFQDN", "hostNetwork"):
            if spec.flag(other):
                yield Violation(spec.at("hostnameOverride"), f"cannot be combined with {other}", "keep one of them")
    yield from within(spec, "activeDeadlineSeconds", 1, 2**31 - 1)
    os = spec.get("os")
    if os is not None and os.text("name") not in ("linux", "windows"):
        yield Violation(os.at("name"), f'"{os.text("name")}" is not one of linux, windows', "write linux")
    if pod.system == "windows":
        for holder in (spec, *spec.items("containers")):
            yield Violation(holder.at("securityContext"), "contains Linux settings", "write os: {name: linux}")


@of("ObjectMeta")
def metadata_is_sound(metadata: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateLabels, ValidateAnnotations."""
    yield from labels(metadata, "labels")
    size = 0
    for key, value in metadata.entries("annotations").items():
        yield from names.qualified(value.path, key.lower())
        size += len(key.encode()) + len(str(value.value).encode())
    if size > 256 << 10:
        yield Violation(metadata.at("annotations"), f"have {size} bytes in total", "use at most 262144")
    cost = metadata.entries("annotations").get("controller.kubernetes.io/pod-deletion-cost")
    if cost is not None and isinstance(cost.value, str):
        number = re.fullmatch(r"0|-?[1-9][0-9]*", cost.value)
        if not number or not -(2**31) <= int(cost.value) < 2**31:
            yield Violation(cost.path, f'"{cost.value}" is not a whole number', "write one")
