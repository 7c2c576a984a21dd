"""What processes of a pod may do: users, profiles, privileges (as Kubernetes' own validation sees them)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.paths import descending
from rljob_api.pod_template.registry import PodSeen, chosen, of, within
from rljob_api.violations import Violation

_LARGEST_ID = 2**31 - 1
_PROFILES = ("Localhost", "RuntimeDefault", "Unconfined")
_WINDOWS_USER = (
    r"(([^\\/:*?\"<>|.\x00-\x1f][^\\/:*?\"<>|\x00-\x1f]{0,14}|[a-zA-Z0-9][a-zA-Z0-9.-]{0,253})\\)?"
    r"(?![. ]+$)[^\"/\\:;|=,+*?<>@\[\]\x00-\x1f]{1,104}"
)
_SEGMENT = "[a-z0-9]([-_a-z0-9]*[a-z0-9])?"


@of("SecurityContext", "PodSecurityContext")
def users_have_numbers(security: Located, pod: PodSeen) -> Iterator[Violation]:
    """IsValidUserID, IsValidGroupID."""
    for name in ("runAsUser", "runAsGroup", "fsGroup"):
        yield from within(security, name, 0, _LARGEST_ID)
    for group in security.items("supplementalGroups"):
        number = group.value
        if isinstance(number, int) and not isinstance(number, bool) and not 0 <= number <= _LARGEST_ID:
            yield Violation(group.path, f"{number} is not a group ID", f"must be 0 to {_LARGEST_ID}")


@of("SecurityContext")
def privileges_do_not_contradict(security: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateSecurityContext. rljob itself says allowPrivilegeEscalation: false of Ray's container."""
    if security.flag("allowPrivilegeEscalation") is False:
        capabilities = security.get("capabilities")
        added = [value for _, value in capabilities.texts("add")] if capabilities is not None else []
        if security.flag("privileged"):
            problem = "cannot be true if allowPrivilegeEscalation is false"
            yield Violation(security.at("privileged"), problem, "also set that to true")
        if "CAP_SYS_ADMIN" in added and capabilities is not None:
            problem = "CAP_SYS_ADMIN cannot be added if allowPrivilegeEscalation is false"
            yield Violation(capabilities.at("add"), problem, "also set that to true")
    mount = security.get("procMount")
    if mount is not None and mount.value == "Unmasked" and pod.spec.flag("hostUsers") is not False:
        yield Violation(mount.path, "Unmasked needs hostUsers: false", "set it")
    if mount is not None and isinstance(mount.value, str) and mount.value not in ("Default", "Unmasked"):
        yield Violation(mount.path, f'"{mount.value}" is not one of Default, Unmasked', "choose one of them")


@of("SeccompProfile", "AppArmorProfile")
def profiles_are_named(profile: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateSeccompProfileField, ValidateAppArmorProfileField."""
    kind, name = profile.text("type"), profile.get("localhostProfile")
    if not kind:
        yield Violation(profile.at("type"), "is required", f"choose one of {', '.join(_PROFILES)}")
    if kind == "Localhost" and (name is None or name.value == ""):
        yield Violation(profile.at("localhostProfile"), "is required by type Localhost", "add it")
    elif kind != "Localhost" and name is not None:
        yield Violation(name.path, "applies only to type Localhost", "remove it")


@of("SeccompProfile")
def profiles_stay_inside(profile: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateLocalDescendingPath."""
    if profile.text("type") == "Localhost":
        yield from descending(profile.at("localhostProfile"), profile.text("localhostProfile"))


@of("AppArmorProfile")
def profiles_are_not_padded(profile: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateAppArmorProfileField."""
    name = profile.text("localhostProfile")
    if profile.text("type") == "Localhost" and (name != name.strip() or len(name) > 4095):
        yield Violation(profile.at("localhostProfile"), "is too long or has spaces around it", "write only the name")


@of("PodSecurityContext")
def kernel_settings_have_names(security: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateSysctls, and the policies of a pod."""
    seen: set[str] = set()
    for setting in security.items("sysctls"):
        name = setting.text("name")
        if len(name) > 253 or not re.fullmatch(rf"({_SEGMENT}[./])*{_SEGMENT}", name):
            yield Violation(setting.at("name"), f'"{name}" is not a kernel setting', "write it like net.core.somaxconn")
        elif name in seen:
            yield Violation(setting.at("name"), f'"{name}" is listed twice', "keep one of them")
        seen.add(name)
    for name, values in (
        ("fsGroupChangePolicy", ("OnRootMismatch", "Always")),
        ("supplementalGroupsPolicy", ("Merge", "Strict")),
        ("seLinuxChangePolicy", ("Recursive", "MountOption")),
    ):
        found = security.get(name)
        if found is not None and isinstance(found.value, str) and found.value not in values:
            yield Violation(found.path, f'"{found.value}" is not one of {", ".join(values)}', "choose one of them")


@of("WindowsSecurityContextOptions")
def windows_options_have_names(options: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateWindowsSecurityContextOptions, validateWindowsHostProcessPod, validateLinux."""
    if pod.system == "linux":
        yield Violation(options.path, "cannot be set for a Linux pod", "remove it")
    if options.flag("hostProcess"):
        yield Violation(options.at("hostProcess"), "needs hostNetwork, which rljob sets itself", "remove it")
    for name in ("gmsaCredentialSpec", "gmsaCredentialSpecName", "runAsUserName"):
        yield from chosen(options, name)
    yield from names.subdomain(options.at("gmsaCredentialSpecName"), options.text("gmsaCredentialSpecName"))
    user = options.text("runAsUserName")
    if user and not re.fullmatch(_WINDOWS_USER, user):
        yield Violation(options.at("runAsUserName"), f'"{user}" is not a Windows user', "write DOMAIN\\user or user")
