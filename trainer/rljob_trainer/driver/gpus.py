"""Whether a machine has the GPUs that a job asks for. A private Ray gets no further nodes: without this look, whoever
needs a GPU that is not there would wait for it until its deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rljob_trainer.aside import aside
from rljob_trainer.errors import JobFileError

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec

_INSTALL = "torch here is a CPU build: run `make install ACCELERATOR=gpu` (in a container, use the GPU image)"
_COUNTED_SECONDS, _PAUSE_SECONDS = 10.0, 0.05
"""Within which Ray's head has counted what its node has; it has a CPU whatever else is there."""


def gpus_wanted(spec: ResolvedSpec) -> dict[str, int]:
    """The GPUs that each pool of a job takes, by its field of the job file; pools without any are left out.

    Colocated engines have those of the learner's ranks.
    """
    pools = {"spec.trainer": spec.trainer.replicas * spec.trainer.gpus_per_replica}
    if spec.placement == "separate":
        pools["spec.rollout"] = spec.rollout.replicas * spec.rollout.gpus_per_replica
    if spec.reward_model is not None:
        pools["spec.rewardModel"] = spec.reward_model.replicas * spec.reward_model.gpus_per_replica
    if spec.judge is not None:
        pools["spec.judge"] = spec.judge.replicas * spec.judge.gpus_per_replica
    return {name: gpus for name, gpus in pools.items() if gpus}


def check_gpus(spec: ResolvedSpec, there: int, *, cuda_build: bool) -> None:
    """``there``: GPUs of the machine; ``cuda_build``: whether torch could use them. Raises ``JobFileError``."""
    wanted = gpus_wanted(spec)
    total = sum(wanted.values())
    if not total or (total <= there and cuda_build):
        return
    if total <= there:
        raise JobFileError(f"the job needs {_counted(total)} and this machine has {there}, but {_INSTALL}")
    remedies = [] if cuda_build else [_INSTALL]
    remedies.append("check `nvidia-smi` and CUDA_VISIBLE_DEVICES if there should be more")
    without_engines = total - wanted.get("spec.rollout", 0)
    if "spec.trainer" in wanted and without_engines < total:
        remedies.append(f"use `placement: colocated`, which needs {without_engines}")
    if total > len(wanted):
        remedies.append("use fewer replicas, or fewer GPUs per replica")
    remedies.append("or use a cluster (docs/real-cluster.md)")
    shares = ", ".join(f"{name} {gpus}" for name, gpus in wanted.items())
    raise JobFileError(
        f"the job needs {_counted(total)} ({shares}), but this machine has {there or 'none'}: {'; '.join(remedies)}"
    )


async def check_gpus_of_machine(spec: ResolvedSpec) -> None:
    """Compares with what the private Ray that this process is connected to has. Raises ``JobFileError``."""
    if not gpus_wanted(spec):
        return
    import ray
    import torch

    clock = asyncio.get_running_loop().time
    until = clock() + _COUNTED_SECONDS
    # Ray asks its head, which may be slow to answer.
    while "CPU" not in (counted := await aside(ray.cluster_resources)):
        if clock() > until:
            return
        await asyncio.sleep(_PAUSE_SECONDS)
    check_gpus(spec, int(counted.get("GPU", 0)), cuda_build=torch.version.cuda is not None)


def _counted(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"
