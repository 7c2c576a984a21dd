"""Keys and passwords stay in the driver: what leaves it as text (errors, log lines, status, samples, summary, report,
trackers) has ``***`` in their place. Whoever may read a job's status may not read the Secrets of its namespace.

A reward function can raise with its request's headers, a library can print its configuration: so the *values* are
looked for, in the forms in which text is written, whatever stands around them. They are

- those of environment variables whose name says so (``..._KEY``, ``..._TOKEN``, ``PASSWORD``), and of all that the job
  takes from a Secret (``know``), whatever their name;
- passwords within addresses (``https://user:password@host``);
- what is in files that such a variable names, or that a Secret's volume mounts.

Values of less than eight characters are not masked: they would be found in ordinary text.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from rljob_api.spec.pod import Pod

_SHORTEST = 8
_LARGEST_FILE = 1 << 16
_MOST_FILES = 256
_NAMES = re.compile(
    r"(?i)key|token|secret|pass(w|phrase|$)|pwd$|connection_?string|_sas$"
    r"|credential|auth(?!or)|private|cookie|webhook|dsn$"
)
_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_WORD = re.compile(r"[A-Za-z0-9+/=_.~\-]{16,}")
_PUBLIC = re.compile(
    r"(RAY|KUBERNETES|PYTHON|CUDA|NVIDIA|NCCL|OMP|VLLM|TORCH|RLJOB|LC)_.*|.*_(SERVICE_(HOST|PORT)|PORT)(_.*)?"
    r"|PATH|HOME|HOSTNAME|LANG|PWD|SHELL|TERM|USER|TMPDIR|DEBIAN_FRONTEND|VIRTUAL_ENV"
    r"|(.*_)?(PATH|REGION|BUCKET|ENDPOINT|PROJECT|ENTITY|NAMESPACE)"
)
"""Variables of images, of Kubernetes and of Ray, beside which those that come from a whole Secret cannot be told."""

_known: set[str] = set()
_pattern: re.Pattern[str] | None = None
_looked = False


def know(pods: Iterable[Pod], environment: Mapping[str, str] = os.environ) -> None:
    """Masks from now on what these pods of a job have from Secrets, too: this process runs in one of them."""
    for pod in pods:
        _add(_of_pod(pod, environment))


def masked(text: str) -> str:
    """The text without secret values."""
    global _looked
    if not _looked:
        _add(_of_environment(os.environ))
        _looked = True
    return text if _pattern is None else _pattern.sub("***", text)


def _add(values: Iterable[str]) -> None:
    global _pattern
    _known.update(form for value in values for form in _forms(value))
    if _known:
        # A value may begin with another one.
        _pattern = re.compile("|".join(map(re.escape, sorted(_known, key=len, reverse=True))))


def _forms(value: str) -> Iterator[str]:
    """How a value is written: as it is, each of its lines, and as JSON, Python, addresses and HTML have it."""
    for text in {value.strip(), *(line for line in map(str.strip, value.splitlines()) if len(line) >= 2 * _SHORTEST)}:
        if len(text) >= _SHORTEST:
            yield from (text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe=""), html.escape(text))


def _of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        yield from _PASSWORD.findall(value)
        if _NAMES.search(name):
            yield from _of_variable(value)


def _of_variable(value: str) -> Iterator[str]:
    """What is secret of a variable's value: itself, or the file that it names. A number, a word such as ``token``
    (``RAY_AUTH_MODE``) and a path are none."""
    if value.startswith("/"):
        yield from _of_file(Path(value))
    elif not (value.isdigit() or (value.isalpha() and value.islower())):
        yield value


def _of_pod(pod: Pod, environment: Mapping[str, str]) -> Iterator[str]:
    settings: Any = pod.model_dump(by_alias=True, exclude_none=True)
    template: Any = settings.get("template", {}).get("spec") or {}
    containers = [settings, *(template.get("containers") or ())]
    variables = [entry for container in containers for entry in container.get("env") or ()]
    for entry in variables:
        if (entry.get("valueFrom") or {}).get("secretKeyRef"):
            yield environment.get(entry["name"], "")
    if any(source.get("secretRef") for container in containers for source in container.get("envFrom") or ()):
        named = {entry["name"] for entry in variables}
        yield from (v for name, v in environment.items() if name not in named and not _PUBLIC.fullmatch(name))
    volumes = [*(settings.get("volumes") or ()), *(template.get("volumes") or ())]
    secret = {volume.get("name") for volume in volumes if _is_secret(volume)}
    for mount in (mount for container in containers for mount in container.get("volumeMounts") or ()):
        if mount.get("name") in secret:
            place = Path(mount["mountPath"])
            for path in [place] if place.is_file() else sorted(place.rglob("*"))[:_MOST_FILES]:
                yield from _of_file(path)


def _is_secret(volume: Mapping[str, Any]) -> bool:
    sources = (volume.get("projected") or {}).get("sources") or ()
    return bool(volume.get("secret")) or any(source.get("secret") for source in sources)


def _of_file(path: Path) -> Iterator[str]:
    """Of JSON what its names say; else the words that are as long as keys are, and without any, all of it."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            return
        text = path.read_text(errors="replace")
    except OSError:
        return
    try:
        yield from _of_tree(json.loads(text))
    except (ValueError, RecursionError):
        yield from _WORD.findall(text) or [text]


def _of_tree(tree: Any) -> Iterator[str]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, str):
            if _NAMES.search(name):
                yield value
        else:
            yield from _of_tree(value)
    for value in tree if isinstance(tree, list) else ():
        yield from _of_tree(value)
