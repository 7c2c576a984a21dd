"""An engine as a Ray actor: what the driver's pool talks to.

The actor adds nothing to ``EngineLoop`` but its process. Its methods block, so it runs with several threads
(``ACTOR_OPTIONS``): a long poll in ``collect`` does not keep ``abort`` or ``status`` waiting.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest
from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.errors import EngineError
from rljob_trainer.garbage import settle
from rljob_trainer.models.fixed import FixedModel
from rljob_trainer.models.sharing import fetch_model
from rljob_trainer.rollout.columns import Results
from rljob_trainer.rollout.engine_loop import EngineLoop, EngineStatus
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.residence import Resident

ACTOR_OPTIONS: Mapping[str, Any] = {"max_concurrency": 16, "max_restarts": 0}
"""Ray options of every engine actor. Restarting is the pool's decision: a new engine needs weights before it serves."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to build an engine; what crosses to the actor."""

    kind: Literal["torch", "vllm"]
    folder: str
    """The model: a local Hugging Face folder."""
    files: FixedModel | None = None
    """The model where each node looks for it itself, in place of ``folder``; its weights never change."""
    address: str | None = None
    """Where a node that has no such folder takes it from."""
    dtype: str = "float32"
    device: str = "cpu"
    max_context: int | None = None
    max_concurrent: int = 256
    version: int = 0
    """The policy version of the weights in the folder."""
    tensor_parallel: int = 1
    seed: int = 0
    keep_cache: bool = False
    """Requests that run across an update go on with the keys and values they have."""
    adapter_rank: int | None = None
    """Updates bring adapters of this rank to the model in the folder (vllm); None: whole models."""
    own_process: bool = False
    """Whether vLLM's core has a process of its own."""
    start_seconds: float = 600.0
    """How long such a process may take to start."""
    tells_experts: bool = False
    """Responses say which experts their tokens were sent to (vllm)."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """torch: keyword arguments of ``TorchEngine.from_folder``; vllm: of vLLM's ``EngineArgs``."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where an engine's process is."""

    pod: str
    """The pod's name; outside Kubernetes that of the host."""
    process: int
    children: tuple[int, ...] = ()
    """Processes of its own: that of vLLM's core (``rollout.multiprocessing``), and workers."""
    program: str = ""
    """vLLM with its version and model runner; empty for the project's own engine."""


def own_pod() -> str:
    """Where this process is, as ``EnginePlace`` has it."""
    # KubeRay puts the pod's name there; with the host's network the host name is another one.
    return os.environ.get("RAY_CLOUD_INSTANCE_ID") or socket.gethostname()


def build_engine(spec: EngineSpec, ended: Callable[[EngineError], None] = lambda error: None) -> Engine:
    """The engine that ``spec`` describes. Imports only what it needs. ``ended`` is told, in another thread, when the
    process ends that vLLM's core has of its own."""
    if spec.files is not None:
        spec = replace(spec, folder=str(spec.files.folder()))
    if spec.address is not None:
        fetch_model(Path(spec.folder), spec.address)
    if spec.kind == "torch":
        import torch

        from rljob_trainer.rollout.torch_engine import TorchEngine

        return TorchEngine.from_folder(
            spec.folder,
            dtype=getattr(torch, spec.dtype),
            device=spec.device,
            version=spec.version,
            max_concurrent=spec.max_concurrent,
            max_context=spec.max_context,
            **spec.engine_args,
        )
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(
        spec.folder,
        dtype=spec.dtype,
        device=spec.device,
        version=spec.version,
        max_concurrent=spec.max_concurrent,
        max_context=spec.max_context,
        tensor_parallel=spec.tensor_parallel,
        seed=spec.seed,
        keep_cache=spec.keep_cache,
        adapter_rank=spec.adapter_rank,
        own_process=spec.own_process,
        ended=ended,
        start_seconds=spec.start_seconds,
        tells_experts=spec.tells_experts,
        engine_args=spec.engine_args,
    )


class EngineActor:
    """The class to start with ``ray.remote(EngineActor).options(**ACTOR_OPTIONS, ...)``."""

    def __init__(self, name: str, spec: EngineSpec) -> None:
        # The engine may end before its loop is there, and whoever tells that waits for the loop.
        loop: Future[EngineLoop] = Future()
        self._loop = EngineLoop(lambda: build_engine(spec, lambda error: loop.result().fail(error)), name)
        loop.set_result(self._loop)
        settle()

    def ready(self) -> int:
        """Returns the process id once the engine is built."""
        return os.getpid()

    def place(self) -> EnginePlace:
        children = tuple(child.pid for child in psutil.Process().children(recursive=True))
        return EnginePlace(
            own_pod(), os.getpid(), children, self._loop.call(lambda engine: getattr(engine, "program", ""))
        )

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._loop.submit(requests)

    def collect(self, wait_seconds: float, linger_seconds: float = 0.0) -> Results:
        return self._loop.collect(wait_seconds, linger_seconds)

    def abort(self, ids: Iterable[EpisodeId] | None = None) -> Results:
        return self._loop.abort(ids)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[FloatArray]:
        return self._loop.score(sequences, temperature)

    def status(self) -> EngineStatus:
        return self._loop.status()

    def weight_ranks(self) -> int:
        return self._loop.weight_ranks()

    def join_weights(self, link: WeightLink, first_rank: int, timeout: float) -> None:
        self._loop.join_weights(link, first_rank, timeout)

    def receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        return self._loop.receive_weights(version, timeout)

    def resident(self, in_any_order: bool = False) -> Resident | None:
        return self._loop.resident(in_any_order)

    def sleep(self, keep_weights: bool = True) -> None:
        self._loop.sleep(keep_weights)

    def wake_weights(self) -> None:
        self._loop.wake_weights()

    def wake(self) -> None:
        self._loop.wake()

    def wait_until_ended(self) -> None:
        self._loop.wait_until_ended()

    def close(self) -> None:
        self._loop.close()
