"""`rljob plan --memory`: where a job's model is described, and the table of what each device holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from rljob_api.memory import (
    MemoryHolder,
    MemoryPlan,
    ModelShape,
    UnknownShapeError,
    bytes_of,
    gib,
    known_shape,
    parts,
    plan_memory,
    untold,
)
from rljob_api.memory.accelerators import known_products, product_memory
from rljob_api.memory.shape import FAMILIES
from rljob_api.resolved import ResolvedJob
from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import check_config, read_json
from rljob_trainer.models.hub_cache import cached_file
from rljob_trainer.preflight.model import undivided
from rljob_trainer.preflight.places import HUB, local_path

_CONFIG = "config.json"
_LEAST = 1 << 30


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """--memory and what goes with it."""
    parser.add_argument(
        "--memory", action="store_true", help="predict the memory of each GPU and whether it fits, instead of times"
    )
    parser.add_argument(
        "--gpu-memory",
        type=_gpu_memory,
        metavar="SIZE",
        help="--memory: memory of each GPU, as a size (80Gi) or a product name (H100-80GB-HBM3). Default: from the "
        "pools' nodeSelector (nvidia.com/gpu.memory or nvidia.com/gpu.product)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="--memory: folder with the model's config.json. Default: the job's model",
    )
    parser.add_argument(
        "--critic-model",
        type=Path,
        metavar="DIR",
        help="--memory: folder with the config.json of algorithm.critic.model. Default: the job's critic",
    )


def _gpu_memory(text: str) -> int:
    size = product_memory(text) or bytes_of(text)
    if not size:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a size like 80Gi nor one of the known products: {', '.join(known_products())}"
        )
    if size < _LEAST:
        unit = f"; did you mean {text}Gi?" if text.isdecimal() else ""
        raise argparse.ArgumentTypeError(f"{text} is less than 1 GiB{unit}")
    return size


def planned(
    job: ResolvedJob, base: Path, memory: int | None, model: Path | None, critic: Path | None = None
) -> tuple[MemoryPlan, str]:
    """The plan, and where the model's shape comes from; ``model`` and ``critic``: folders to take in place of what the
    job names. Raises ``JobFileError`` where nothing says a shape."""
    if (problem := untold(job)) is not None:
        raise JobFileError(problem)
    found = _of_folder(model) if model is not None else described(job, base)
    if found is None and job.spec.model.random is not None:
        raise JobFileError(
            f"spec.model.random: memory can be predicted only for the families {', '.join(FAMILIES)}, and only if the "
            "job sets the vocabulary; pass a folder with the model's config.json with --model DIR"
        )
    if found is None:
        raise JobFileError(
            f"spec.model: {_name(job)} has no {_CONFIG} on this machine and is not a model known by name; pass a "
            "folder that has one with --model DIR"
        )
    shape, origin = found
    critic_shape = _of_critic(job, base, critic)
    if (problem := untold(job, shape, critic_shape)) is not None:
        raise JobFileError(problem)
    for each in (shape, critic_shape):
        for wrong in undivided(job.spec.trainer.parallelism, each) if each is not None else ():
            raise JobFileError(str(wrong))
    return plan_memory(job, shape, memory, critic_shape=critic_shape), origin


def _of_critic(job: ResolvedJob, base: Path, folder: Path | None) -> ModelShape | None:
    """The shape of the critic's own model; None: it has none. Raises ``JobFileError`` where nothing says its shape."""
    critic = job.spec.algorithm.critic
    if critic is None or critic.model is None:
        if folder is not None:
            raise JobFileError("--critic-model: the job has no algorithm.critic.model; remove the option")
        return None
    own = critic.model
    found = _of_folder(folder) if folder is not None else _of_source(own.source, own.revision, base)
    if found is None:
        raise JobFileError(
            f"spec.algorithm.critic.model: {own.source} has no {_CONFIG} on this machine and is not a model known by "
            "name; pass a folder that has one with --critic-model DIR"
        )
    return found[0]


def described(job: ResolvedJob, base: Path) -> tuple[ModelShape, str] | None:
    """The shape of the job's model and what says it; None: nothing here does. Raises ``JobFileError`` for a file that
    is wrong, or of a family that is not known."""
    model = job.spec.model
    if model.random is not None:
        random = ModelShape.of_random(model.random)
        return None if random is None else (random, "the job")
    return _of_source(model.source or "", model.revision, base)


def _of_source(source: str, revision: str | None, base: Path) -> tuple[ModelShape, str] | None:
    folder = None if source.startswith(f"{HUB}://") else local_path(source, base)
    if folder is not None and folder.is_dir():
        return _of_folder(folder)
    cached = cached_file(source.removeprefix(f"{HUB}://"), _CONFIG, revision)
    if cached is not None:
        return _of_folder(cached.parent)
    known = known_shape(source)
    return None if known is None else (known, "its name")


def _of_folder(folder: Path) -> tuple[ModelShape, str]:
    file = folder / _CONFIG
    config = read_json(file)
    check_config(config, file)
    try:
        return ModelShape.from_config(config), str(file)
    except UnknownShapeError as problem:
        raise JobFileError(f"{file}: {problem}; its memory cannot be predicted") from None


def _name(job: ResolvedJob) -> str:
    model = job.spec.model
    return model.source or "the random model"


def _critic_name(job: ResolvedJob) -> str | None:
    """The source of the critic's own model; None: it has none."""
    critic = job.spec.algorithm.critic
    return None if critic is None or critic.model is None else critic.model.source


def as_json(plan: MemoryPlan, job: ResolvedJob, origin: str) -> str:
    """Bytes throughout."""
    changes = {name: {s.path: s.value for s in change.settings} for name, change in plan.remedies.items()}
    adapter = plan.inputs.adapter
    critic, own = _critic_name(job), plan.inputs.trained_shapes[-1]
    return json.dumps(
        {
            "model": {
                "name": _name(job),
                "parameters": plan.inputs.shape.parameters,
                "adapterParameters": adapter.parameters(plan.inputs.shape) if adapter is not None else 0,
                "knownBy": origin,
            },
            **({} if critic is None else {"critic": {"name": critic, "parameters": own.parameters}}),
            "largestRowTokens": plan.inputs.row.tokens,
            "devices": [
                {
                    "name": device.name,
                    "count": device.count,
                    "capacity": device.capacity,
                    "missing": device.missing,
                    "notes": list(device.notes),
                    "moments": [{"name": m.name, "total": m.total, "parts": dict(m.parts)} for m in device.moments],
                }
                for device in plan.devices
            ],
            "fits": plan.fits,
            "changes": changes,
        },
        indent=1,
    )


def as_text(plan: MemoryPlan, job: ResolvedJob, origin: str) -> str:
    """A column for each kind of device at its fullest, and whether it fits."""
    inputs = plan.inputs
    row, rank = inputs.row, inputs.rank()
    layout = f"shard {rank.layout.shard}"
    layout += f" x replicate {inputs.replicate}" if inputs.replicate > 1 else ""
    layout += f" x context {inputs.context_ranks}" if inputs.context_ranks > 1 else ""
    layout += f" x tensor {inputs.tensor_ranks}" if inputs.tensor_ranks > 1 else ""
    adapter = inputs.adapter
    trained = "" if adapter is None else f"; adapter with {adapter.parameters(inputs.shape):,} trained parameters"
    critic = "" if inputs.critic_shape is None else f"; critic {_critic_name(job)}: {inputs.critic_shape.parameters:,}"
    head = (
        f"{_name(job)}: {inputs.shape.parameters:,} parameters (from {origin}){trained}{critic}; {layout}\n"
        f"largest row: {row.tokens} tokens ({_counted(row.groups, 'prompt')} of {row.prompt}, "
        f"{_counted(row.samples, 'response')} of {row.response})"
    )
    return "\n".join([head, "", *_table(plan.devices), "", *_verdicts(plan)])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")


def _table(devices: tuple[MemoryHolder, ...]) -> Iterator[str]:
    peaks = [device.peak for device in devices]
    large = max(peak.total for peak in peaks) >= 1 << 30
    shown = gib if large else _mib
    lines = [
        [
            "peak memory, GiB" if large else "peak memory, MiB",
            *(f"{device.name} x{device.count}" for device in devices),
        ]
    ]
    lines.append(["", *(peak.name for peak in peaks)])
    for part in parts.ORDER:
        if any(part in peak.parts for peak in peaks):
            lines.append([part, *(shown(peak.parts[part]) if part in peak.parts else "" for peak in peaks)])
    lines.append(["total", *(shown(peak.total) for peak in peaks)])
    lines.append(["available", *("?" if d.capacity is None else shown(d.capacity) for d in devices)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        padded = zip(line, widths, strict=True)
        cells = [text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(padded)]
        yield "  ".join(cells).rstrip()


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"


def _verdicts(plan: MemoryPlan) -> Iterator[str]:
    for device in plan.devices:
        yield from (f"{device.name}: {note}." for note in device.notes)
    unknown = [device.name for device in plan.devices if device.capacity is None]
    for device in plan.devices:
        if device.missing:
            change = plan.remedies.get(device.name)
            remedy = f"To make it fit: {change}" if change else "No known change makes it fit."
            yield f"{device.name}: {gib(device.missing)} GiB too much. {remedy}"
        elif parts.KV_CACHE in device.peak.parts or device.capacity is None:
            continue  # an engine takes what it is told to take
        elif device.peak.total > 0.9 * device.capacity:
            yield f"{device.name}: fits, but less than 10 % is free, which fragmentation may use up."
    if not plan.fits:
        return
    if len(unknown) < len(plan.devices):
        yield "It fits" + (f", except for memory of unknown size ({', '.join(unknown)})." if unknown else ".")
    else:
        yield "The available memory is unknown: pass --gpu-memory 80Gi, or set a nodeSelector and memory limits."
