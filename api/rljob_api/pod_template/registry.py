"""Who says what about which type of a pod: one small function a rule, registered under the type that it looks at.

The functions follow Kubernetes' own validation (``pkg/apis/core/validation``), whose names their docstrings give. They
see values of any shape, since what has a wrong type is told by ``shape``, and say nothing of those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from rljob_api.pod_template.located import Located
from rljob_api.violations import Violation


@dataclass(frozen=True)
class PodSeen:
    """The pod that a part belongs to."""

    template: Located
    """The whole pod template."""

    @cached_property
    def spec(self) -> Located:
        return self.template.get("spec") or Located(self.template.at("spec"), {})

    @cached_property
    def volumes(self) -> dict[str, Located]:
        """The volumes of the pod by their names."""
        return {name: volume for volume in self.spec.items("volumes") if (name := volume.text("name"))}

    @cached_property
    def claims(self) -> set[str]:
        """Names of the resource claims."""
        return {name for claim in self.spec.items("resourceClaims") if (name := claim.text("name"))}

    @property
    def grace_seconds(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        seconds = self.spec.number("terminationGracePeriodSeconds")
        return 30 if seconds is None else seconds

    @property
    def system(self) -> str:
        """The operating system that the pod names, if it does."""
        os = self.spec.get("os")
        return os.text("name") if os is not None else ""


Check = Callable[[Located, PodSeen], Iterator[Violation]]
CHECKS: dict[str, list[Check]] = defaultdict(list)


def of(*types: str) -> Callable[[Check], Check]:
    """Registers a check of the objects of these types."""

    def register(check: Check) -> Check:
        for name in types:
            CHECKS[name].append(check)
        return check

    return register


def required(node: Located, *names: str) -> Iterator[Violation]:
    """The fields that are empty or not there."""
    for name in names:
        found = node.get(name)
        if found is None or found.value in ("", [], {}):
            yield Violation(node.at(name), "is required", "add it")


def chosen(node: Located, name: str) -> Iterator[Violation]:
    """A choice that is written and empty, where only one that is not written has a default."""
    found = node.get(name)
    if found is not None and found.value == "":
        yield Violation(found.path, "is empty", "set one, or remove it")


def within(node: Located, name: str, low: int, high: int | None = None) -> Iterator[Violation]:
    """A number that is out of its bounds."""
    value = node.number(name)
    if value is not None and (value < low or (high is not None and value > high)):
        allowed = f"{low} to {high}" if high is not None else f"at least {low}"
        yield Violation(node.at(name), f"{value} is too {'small' if value < low else 'large'}", f"must be {allowed}")
