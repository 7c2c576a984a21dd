"""What names may look like: of objects, labels, ports, variables (k8s.io/apimachinery/pkg/util/validation)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from rljob_api.spec.base import DNS_LABEL, DNS_SUBDOMAIN, LABEL_NAME
from rljob_api.violations import Violation

_LABEL = "use at most 63 lower-case letters, digits and '-', with a letter or digit at both ends"
_SUBDOMAIN = "use lower-case letters, digits, '-' and '.', with a letter or digit at both ends of each part"
_QUALIFIED = "use at most 63 letters, digits, '-', '_' and '.', optionally after a domain and /"
_VALUE = "use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_PORT = "use at most 15 lower-case letters, digits and single '-', with at least one letter"


def is_label(text: str) -> bool:
    """IsDNS1123Label."""
    return len(text) <= 63 and bool(re.fullmatch(DNS_LABEL[1:-1], text))


def is_subdomain(text: str) -> bool:
    """IsDNS1123Subdomain."""
    return len(text) <= 253 and bool(re.fullmatch(DNS_SUBDOMAIN[1:-1], text))


def is_qualified(text: str) -> bool:
    """IsQualifiedName: the name of a label, a resource, a condition."""
    domain, slash, name = text.rpartition("/")
    return bool(re.fullmatch(LABEL_NAME, name)) and (not slash or is_subdomain(domain))


def is_label_value(text: str) -> bool:
    """IsValidLabelValue."""
    return bool(re.fullmatch(f"({LABEL_NAME})?", text))


def is_port_name(text: str) -> bool:
    """IsValidPortName."""
    plain = re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", text)
    return bool(plain) and "--" not in text and any(letter.isalpha() for letter in text)


def is_variable(text: str) -> bool:
    """IsRelaxedEnvVarName."""
    return bool(text) and all(" " <= letter <= "~" and letter != "=" for letter in text)


def is_key(text: str) -> bool:
    """IsConfigMapKey."""
    return bool(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", text)) and text != "." and not text.startswith("..")


def is_address(text: str) -> bool:
    """IsValidIPForLegacyField, as of Kubernetes 1.36: no leading zeros, no IPv4 within IPv6."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped is not None or "%" in text))


def label(path: str, text: str) -> Iterator[Violation]:
    if text and not is_label(text):
        yield Violation(path, f'"{text}" cannot be part of a host name', _LABEL)


def subdomain(path: str, text: str) -> Iterator[Violation]:
    if text and not is_subdomain(text):
        yield Violation(path, f'"{text}" is not a valid object name', _SUBDOMAIN)


def qualified(path: str, text: str) -> Iterator[Violation]:
    if not is_qualified(text):
        yield Violation(path, f'"{text}" does not have the right form', _QUALIFIED)


def label_value(path: str, text: str) -> Iterator[Violation]:
    if not is_label_value(text):
        yield Violation(path, f'"{text}" is not a valid label value', _VALUE)


def port(path: str, value: object) -> Iterator[Violation]:
    """ValidatePortNumOrName."""
    if isinstance(value, bool):
        return
    if isinstance(value, int) and not 1 <= value <= 65535:
        yield Violation(path, f"{value} is not a port", "use 1 to 65535")
    elif isinstance(value, str) and not is_port_name(value):
        yield Violation(path, f'"{value}" is not a valid port name', _PORT)
