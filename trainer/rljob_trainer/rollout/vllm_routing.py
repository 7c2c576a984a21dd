"""Which experts the routers of a vLLM worker choose, kept for each request: what routing replay trains with.

On a GPU vLLM tells by itself (``enable_return_routed_experts``), by its second model runner, which no CPU has. Here the
same is done beside its first one: routers report their choices (``set_capture_fn``), and after each pass they are put
where the pass wrote keys and values (the slots of the cache), and to the requests that the pass was for. A request that
begins with tokens whose keys and values were cached is given the choices that were made when these were computed. What
is computed a second time, after a preemption or an update, is not told a second time: the first choices are those that
the tokens behind them were sampled with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rljob_trainer.episodes.tokens import ByteArray
from rljob_trainer.errors import EngineError


@dataclass(slots=True)
class _Told:
    """What is known of the experts of one request."""

    parts: list[ByteArray]
    """``[tokens, layers, k]`` each; one after the other they are the request's tokens, from the first one on."""
    tokens: int
    """In all parts."""


class RoutingCapture:
    """Listens to the model of a worker's (first) model runner."""

    def __init__(self, runner: Any) -> None:
        """Raises ``EngineError`` for the second model runner, which keeps requests and batches elsewhere, and for a
        model without routers that can be listened to."""
        if not isinstance(runner, GPUModelRunner):
            raise EngineError(
                "vLLM worker: routing replay on a CPU works only with vLLM's first model runner: remove "
                "VLLM_USE_V2_MODEL_RUNNER from rollout.env"
            )
        self._runner = runner
        model: nn.Module = runner.get_model()
        layers = {module.layer_id: module for module in model.modules() if isinstance(module, MoERunner)}
        self._chosen: list[torch.Tensor | None] = [None] * len(layers)
        """By layer, in the pass under way."""
        if not layers:
            raise EngineError("vLLM worker: routing replay needs a mixture of experts, but the model has no router")
        for number, layer in enumerate(sorted(layers)):
            router = layers[layer].router
            if not isinstance(router, BaseRouter):
                raise EngineError(
                    f"vLLM worker: the router of layer {layer} ({type(router).__name__}) does not report its choices"
                )
            router.set_capture_fn(partial(self._choose, number))
            top_k: int = router.top_k
        self._told: dict[str, _Told] = {}
        (group,) = runner.kv_cache_config.kv_cache_groups
        self._block: int = group.kv_cache_spec.block_size
        slots = runner.kv_cache_config.num_blocks * self._block
        self._by_slot = np.zeros((slots, len(layers), top_k), np.uint8)
        model.register_forward_hook(lambda *_: self._passed())

    def take(self, request: str) -> ByteArray:
        """``[tokens, layers, k]`` of a request's tokens that were computed, from the first one on; it is then
        forgotten."""
        told = self._told.pop(request, None)
        return self._by_slot[:0] if told is None else np.concatenate(told.parts)

    def _choose(self, layer: int, chosen: torch.Tensor) -> None:
        self._chosen[layer] = chosen

    def _passed(self) -> None:
        """After a pass."""
        batch = self._runner.input_batch
        if not batch.num_reqs or any(layer is None for layer in self._chosen):
            return
        chosen = torch.stack(self._chosen, 1).to(torch.uint8).cpu().numpy()  # type: ignore[arg-type]
        self._chosen = [None] * len(self._chosen)
        ends = self._runner.query_start_loc.np[1 : batch.num_reqs + 1].tolist()
        start = 0
        for number, (request, end) in enumerate(zip(batch.req_ids, ends, strict=True)):
            self._note(request, int(batch.num_computed_tokens_cpu[number]), chosen[start:end])
            start = end

    def _note(self, request: str, first: int, chosen: ByteArray) -> None:
        """A request's tokens from position ``first`` on were computed."""
        state = self._runner.requests[request]
        slots = self._slots(state, first + len(chosen))
        self._by_slot[slots[first:]] = chosen
        if state.sampling_params is None or state.sampling_params.prompt_logprobs is not None:
            return  # it is scored, and asks for nothing
        told = self._told.get(request)
        if told is None:
            # What stands before was cached.
            told = self._told[request] = _Told([self._by_slot[slots[:first]]], first)
        if first > told.tokens:
            raise EngineError(
                f"vLLM worker: request {request} continues at token {first}, but experts are known of {told.tokens}; "
                "please report this"
            )
        told.parts.append(chosen[told.tokens - first :].copy())
        told.tokens = max(told.tokens, first + len(chosen))

    def _slots(self, state: Any, tokens: int) -> npt.NDArray[np.int64]:
        """``[tokens]`` where the keys and values of a request's tokens lie."""
        blocks = np.asarray(state.block_ids[0][: -(-tokens // self._block)], np.int64)
        return (blocks[:, None] * self._block + np.arange(self._block)).reshape(-1)[:tokens]
