"""How a pod resolves names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.registry import PodSeen, of, required
from rljob_api.violations import Violation

_MOST_SERVERS, _MOST_SEARCHES, _MOST_CHARACTERS = 3, 32, 2048
_SEARCH_PART = "[a-z0-9_]([-_a-z0-9]*[a-z0-9_])?"


@of("PodSpec")
def name_servers_are_there(spec: Located, pod: PodSeen) -> Iterator[Violation]:
    """validatePodDNSConfig: dnsPolicy None means that the pod brings its own."""
    config = spec.get("dnsConfig")
    if spec.text("dnsPolicy") == "None" and (config is None or not config.items("nameservers")):
        yield Violation(spec.at("dnsPolicy"), "None needs dnsConfig.nameservers", "set at least one")


@of("PodDNSConfig")
def name_servers_have_addresses(config: Located, pod: PodSeen) -> Iterator[Violation]:
    """validatePodDNSConfig."""
    servers, searches = list(config.texts("nameservers")), list(config.texts("searches"))
    if len(servers) > _MOST_SERVERS:
        yield Violation(config.at("nameservers"), f"has {len(servers)} items", f"use at most {_MOST_SERVERS}")
    for path, address in servers:
        yield from _address(path, address)
    if len(searches) > _MOST_SEARCHES or len(" ".join(text for _, text in searches)) > _MOST_CHARACTERS:
        limits = f"{_MOST_SEARCHES} items and {_MOST_CHARACTERS} characters"
        yield Violation(config.at("searches"), "is too long", f"use at most {limits}")
    for path, text in searches:
        domain = text.removesuffix(".")
        fits = len(domain) <= 253 and re.fullmatch(rf"{_SEARCH_PART}(\.{_SEARCH_PART})*", domain)
        if text != "." and not fits:
            yield Violation(path, f'"{text}" is not a domain', "use lower-case letters, digits, '-', '_' and '.'")
    for option in config.items("options"):
        yield from required(option, "name")


@of("HostAlias")
def aliases_have_addresses(alias: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateHostAliases."""
    yield from _address(alias.at("ip"), alias.text("ip"))
    for path, name in alias.texts("hostnames"):
        if not names.is_subdomain(name):
            yield Violation(path, f'"{name}" is not a host name', "use lower-case letters, digits, '-' and '.'")


def _address(path: str, text: str) -> Iterator[Violation]:
    if not names.is_address(text):
        yield Violation(path, f'"{text}" is not an IP address', "write one like 10.0.0.1")
