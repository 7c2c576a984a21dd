"""An engine whose core is in its own process, beside a learner on its device: weights reach it, it sleeps and wakes.

What it computes is held against transformers in float32, with the weights that it was started with and with others that
were published to it: on the device, as colocated engines get them, and by gloo, which is what is left where a machine
does not allow that.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.learner import float32_log_probs, responses
from benchmarks.gpu.model import CONTEXT, shaped_model
from benchmarks.gpu.processes import as_engine
from rljob_trainer.learner.protocol import SequenceBatch
from rljob_trainer.models.stored import tensors_in
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.sender import SENDER, Publisher

P = ParamSpec("P")
T = TypeVar("T")
Pair = tuple[list[int], list[int]]
SECONDS = 60.0
SEQUENCES = 8


class OwnProcessEngine:
    """The engine, in a process that this one asks."""

    def __init__(self, spec: EngineSpec) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        with as_engine():  # the pool makes its process for the first call
            self._pool.submit(_start, spec).result()

    def ask(self, call: Callable[Concatenate[EngineLoop, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._pool.submit(_ask, call, *args, **kwargs).result()

    def publish(
        self, publisher: Publisher, link: WeightLink, named: dict[str, Tensor], versions: Sequence[int]
    ) -> float:
        """The same weights under each version; GB/s of the last one."""
        joins = self._pool.submit(_ask, EngineLoop.join_weights, link, 1, SECONDS)
        publisher.connect(link, SECONDS)
        joins.result()
        for version in versions:
            receives = self._pool.submit(_ask, EngineLoop.receive_weights, version, SECONDS)
            report = publisher.publish(describe(named.items()), named.items(), version, SECONDS)
            receives.result()
        publisher.disconnect()
        return report.nbytes / 1e9 / report.seconds

    def close(self) -> None:
        self.ask(EngineLoop.close)
        self._pool.shutdown()


_loops: list[EngineLoop] = []
"""In the engine's process: the one that it drives."""


def _start(spec: EngineSpec) -> None:
    _loops.append(EngineLoop(lambda: build_engine(spec), "0"))


def _ask(call: Callable[Concatenate[EngineLoop, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    return call(_loops[0], *args, **kwargs)


def measure(writer: Writer, device: str, cache: Path) -> None:
    on_gpu = device == "cuda"
    model = shaped_model(cache, "0.5b" if on_gpu else "small")
    batch = responses(model, SEQUENCES, samples=2, tokens=64 if on_gpu else 8)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        other = _other_weights(model, Path(folder), device)
        exact = [float32_log_probs(each, batch, SEQUENCES, device) for each in (model, other)]
        named = [_weights(each, device) for each in (model, other)]
    if on_gpu:
        torch.cuda.empty_cache()
    spec = EngineSpec(
        "vllm",
        str(model),
        dtype="bfloat16" if on_gpu else "float32",
        device=device,
        max_context=CONTEXT,
        max_concurrent=SEQUENCES,
        own_process=True,
        engine_args={"gpu_memory_utilization": 0.4} if on_gpu else {},
    )
    engine = OwnProcessEngine(spec)
    _measure(writer, engine, device, _pairs(batch), exact, named)
    engine.close()


def _measure(
    writer: Writer,
    engine: OwnProcessEngine,
    device: str,
    pairs: list[Pair],
    exact: Sequence[np.ndarray],
    named: Sequence[dict[str, Tensor]],
) -> None:
    """``exact`` and ``named``: of the engine's first weights, and of the others."""
    publisher = Publisher(256 << 20, "127.0.0.1", torch.device(device))
    bound, after_sleep = (0.03, 0.02) if device == "cuda" else (1e-4, 1e-4)

    def scores() -> np.ndarray:
        return np.concatenate(engine.ask(EngineLoop.score, pairs, 1.0))

    def compare(when: str, expected: np.ndarray) -> np.ndarray:
        found = scores()
        error = float(np.abs(found - expected).mean())
        writer.at_most(f"own process, {when}: log-probs against float32, mean difference", error, bound, "nats")
        return found

    first = compare("as it starts", exact[0])
    backends: tuple[Literal["ipc", "gloo"], ...] = ("ipc", "gloo")
    for generation, backend in enumerate(backends, 1):
        weights = generation % 2
        link = WeightLink(publisher.address, generation, (SENDER, "the engine"), backend)
        rate = engine.publish(publisher, link, named[weights], [2 * generation - 1, 2 * generation])
        writer.plain(f"own process, publication by {backend}", rate, "GB/s")
        last = compare(f"after a publication by {backend}", exact[weights])
        if weights:
            # Otherwise what has stayed as it was would pass, too.
            moved = float(np.abs(last - first).mean())
            writer.at_least("own process, published weights: log-probs moved by", moved, 3 * bound, "nats")
    awake = _used(device)
    engine.ask(EngineLoop.sleep, True)
    asleep = _used(device)
    engine.ask(EngineLoop.wake)
    difference = float(np.abs(scores() - last).max())
    what = "own process, scores before sleep and after wake, largest difference"
    writer.at_most(what, difference, after_sleep, "nats")
    if awake:
        writer.plain("own process, device memory in use, awake", awake / 1e9, "GB")
        writer.at_most("own process, device memory in use, asleep, share of that", asleep / awake, 0.25)
    # As in a step: what it had is gone, the learner's next weights come, the cache comes after them.
    engine.ask(EngineLoop.sleep, False)
    engine.ask(EngineLoop.wake_weights)
    link = WeightLink(publisher.address, len(backends) + 1, (SENDER, "the engine"), "ipc")
    engine.publish(publisher, link, named[1], [2 * len(backends) + 1])
    engine.ask(EngineLoop.wake)
    compare("after a sleep without weights and a publication", exact[1])


def _pairs(batch: SequenceBatch) -> list[Pair]:
    """Prompt and response of each sequence."""
    pairs, start = [], 0
    for prompt, response in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True):
        ids = batch.token_ids[start : start + prompt + response].tolist()
        pairs.append((ids[:prompt], ids[prompt:]))
        start += prompt + response
    return pairs


def _other_weights(model: Path, folder: Path, device: str) -> Path:
    """A model of the same shape with other random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    made.to("cpu", torch.bfloat16).save_pretrained(folder)
    return folder


def _weights(folder: Path, device: str) -> dict[str, Tensor]:
    """In a learner's dtype, on its device."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {name: tensor.to(device, dtype) for name, tensor in tensors_in(folder)}


def _used(device: str) -> int:
    """Bytes of the device that others than this process's tensors take."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
