"""The torch engine: continuous batching over a static KV cache, for small models and for the CPU.

Requests wait in a queue, take a row of the cache as one becomes free, are prefilled together (siblings of a prompt
once), and then all running rows advance by one token per ``step``. What happens per token is a fixed number of tensor
operations; Python touches a request only when it enters and when it leaves. What a request draws is fixed by its seed.

The mathematics is in ``decoder.py``, the memory in ``kv_cache.py``, the random numbers in ``sampling.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from rljob_trainer.episodes.episode import FinishReason
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import (
    GenerationRequest,
    GenerationResult,
    already_finished,
    brought_along,
    check_request,
    continued,
    withdrawn,
)
from rljob_trainer.episodes.tokens import FloatArray, Tokens
from rljob_trainer.errors import EngineError
from rljob_trainer.rollout import scoring
from rljob_trainer.rollout.decoder import Decoder, DecoderConfig, module_parameters, read_folder
from rljob_trainer.rollout.kv_cache import KVCache, quarter_of_free_memory
from rljob_trainer.rollout.row_state import RowState
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest
from rljob_trainer.weights.receiver import Receiver, ReceiveReport
from rljob_trainer.weights.residence import Resident, resident

_OVERTAKEN = 64
"""Requests that may go past one that does not fit: then rows stay free until it does."""
_LOOKED_AT = 64
"""Requests that do not fit which are looked at in a step."""


@dataclass(slots=True)
class _Running:
    """A request that owns a row of the cache."""

    request: GenerationRequest
    limit: int
    """Response tokens at which it ends."""
    slot: int
    """Its row in the output buffers; unlike the row in the cache it never changes."""
    started: int
    """The engine's token clock minus its response tokens: both advance together."""
    segments: list[tuple[int, int]]
    """(first response token, version) for every version it was sampled under here."""
    prefilled: int
    """Tokens that it came with and that were computed for it."""

    @property
    def length_offset(self) -> int:
        """Its tokens in all, minus the clock."""
        return len(self.request.prompt_ids) - self.started


class Limits(TypedDict, total=False):
    """Keyword arguments of every constructor of ``TorchEngine``."""

    version: int
    """The policy version of the weights at the start."""
    max_concurrent: int
    """Requests that run at once."""
    max_context: int | None
    """Longest prompt and response together, at most the model's context."""
    kv_cache_bytes: int | None
    """Bound of the cache; None: a quarter of the free memory."""


class TorchEngine:
    """An ``Engine`` in plain torch (Llama family). Build it with ``from_folder`` or ``from_model``."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        shared: bool = False,
        version: int = 0,
        max_concurrent: int = 256,
        max_context: int | None = None,
        kv_cache_bytes: int | None = None,
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        self._decoder = decoder
        self._config = decoder.config
        self._device = decoder.device
        self._shared = shared
        self._version = version
        self._manifest: Manifest | None = None
        self._max_concurrent = max_concurrent
        self._context = min(max_context or self._config.context, self._config.context)
        self._kv_bytes = kv_cache_bytes or quarter_of_free_memory(self._device)
        self._updating = False
        self._loaded: set[str] = set()
        self._asleep = self._gone = False
        self._receiver: Receiver | None = None

        self._waiting: deque[GenerationRequest] = deque()
        self._finished: list[GenerationResult] = []
        self._running: list[_Running] = []
        """In the order of the cache's rows."""
        self._overtaken = 0
        """Requests that were given a row before the first that waits."""
        self._tokens_made = 0
        self._clock = 0
        """Tokens that a request running since the beginning would have."""
        self._longest_offset = 0
        """The longest running sequence minus the clock."""
        self._next_limit = 0
        """The clock at which the first running request reaches its limit."""
        self._cache: KVCache | None = None
        self._rows: RowState | None = None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **limits: Unpack[Limits],
    ) -> TorchEngine:
        """An engine with parameters of its own, read from a Hugging Face folder."""
        return cls(Decoder(*read_folder(folder, dtype, device)), **limits)

    @classmethod
    def from_model(cls, model: torch.nn.Module, **limits: Unpack[Limits]) -> TorchEngine:
        """An engine that samples from a live Hugging Face causal language model without a copy of its parameters.

        An optimizer step is seen at once; ``begin_update`` and ``finish_update`` around it keep the version true.
        """
        config = DecoderConfig.from_hf(model.config.to_dict())  # type: ignore[union-attr,operator]
        return cls(Decoder(config, module_parameters(model)), shared=True, **limits)

    # ------------------------------------------------------------------ requests

    @property
    def version(self) -> int:
        return self._version

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._finished)

    @property
    def tokens_made(self) -> int:
        return self._tokens_made

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerationRequest) -> None:
        check_request(request, self._context)
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if total * self._bytes_per_token() > self._kv_bytes:
            raise ValueError(
                f"{request.id}: its {total} tokens need {total * self._bytes_per_token()} bytes of KV "
                f"cache, but the engine has only {self._kv_bytes}"
            )
        if reason := already_finished(request):
            self._finished.append(brought_along(request, reason))
        else:
            self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[GenerationResult]:
        if self._updating or self._asleep:
            state = "waits for finish_update()" if self._updating else "sleeps; call wake() first"
            raise EngineError(f"torch engine: step() was called while it {state}")
        finished, self._finished = self._finished, []
        if self._waiting:
            finished += self._admit()
        if self._running:
            finished += self._decode()
        return finished

    @torch.inference_mode()
    def abort(self, ids: Iterable[EpisodeId] | None = None) -> list[GenerationResult]:
        wanted = None if ids is None else set(ids)
        results = withdrawn(self._waiting, wanted)
        leaving = [row for row, entry in enumerate(self._running) if wanted is None or entry.request.id in wanted]
        return results + self._leave(dict.fromkeys(leaving, "aborted"))

    # ------------------------------------------------------------------ sampling

    def _admit(self) -> list[GenerationResult]:
        """Gives free rows to waiting requests, prefills them and draws their first token.

        One whose sequence may become too long for the memory beside those that run is passed by shorter ones, for a
        while."""
        batch: list[GenerationRequest] = []
        too_large: list[GenerationRequest] = []
        prefixes: set[tuple[int, ...]] = set()
        longest_prefix = 0
        longest = self._cache.capacity if self._cache else 0
        while self._waiting and len(self._running) + len(batch) < self._max_concurrent:
            request = self._waiting[0]
            prefix = request.prefix
            padded = max(longest_prefix, len(prefix)) * (len(prefixes) + (prefix not in prefixes))
            # Those who run wait for one pass at a time.
            if self._running and batch and padded > scoring.PASS_TOKENS:
                break
            self._waiting.popleft()
            needed = max(longest, len(request.prompt_ids) + request.sampling.max_tokens)
            if len(self._running) + len(batch) < self._rows_at(needed):
                longest, longest_prefix = needed, max(longest_prefix, len(prefix))
                prefixes.add(prefix)
                batch.append(request)
                self._overtaken = self._overtaken + 1 if too_large else 0
            else:
                too_large.append(request)
            if too_large and (len(too_large) >= _LOOKED_AT or self._overtaken >= _OVERTAKEN):
                break
        self._waiting.extendleft(reversed(too_large))
        if not batch:
            return []
        self._make_room(longest, max(request.sampling.max_tokens for request in batch))
        by_prefix: dict[tuple[int, ...], list[GenerationRequest]] = {}
        for request in batch:
            by_prefix.setdefault(request.prefix, []).append(request)
        # Prompts of similar length share a pass, so little of it is padding.
        families = sorted(by_prefix.items(), key=lambda family: len(family[0]))
        done: list[GenerationResult] = []
        for start, stop in scoring.passes([len(prefix) for prefix, _ in families]):
            done += self._prefill(families[start:stop])
        return done

    def _prefill(self, families: list[tuple[tuple[int, ...], list[GenerationRequest]]]) -> list[GenerationResult]:
        """One padded pass over distinct prefixes, each for one or more requests; draws their first token."""
        cache, rows_state = self._memory()
        first = len(self._running)
        source = [index for index, (_, requests) in enumerate(families) for _ in requests]
        members = [request for _, requests in families for request in requests]
        rows = slice(first, first + len(members))
        lengths = [len(prefix) for prefix, _ in families]
        cache.define(first, max(lengths))
        slots = rows_state.enter(members, rows, [lengths[index] for index in source])
        # Siblings share what was computed for the first of them.
        computed = [lengths[index] * (place == 0 or source[place - 1] != index) for place, index in enumerate(source)]
        for request, slot, prefilled in zip(members, slots, computed, strict=True):
            # One token further than what came with the request: the one drawn below.
            started = self._clock - len(request.begun) - 1
            segments = [(len(request.begun), self._version)]
            self._running.append(_Running(request, request.sampling.max_tokens, slot, started, segments, prefilled))
        of_row = torch.tensor(source, device=self._device)
        hidden = self._decoder.prefill(
            scoring.pad([prefix for prefix, _ in families], self._device), cache, rows, of_row
        )
        last = torch.tensor(lengths, device=self._device) - 1
        hidden = hidden[torch.arange(len(families), device=self._device), last]
        rows_state.sample(self._decoder.logits(hidden).index_select(0, of_row), rows)
        self._tokens_made += len(members)
        self._count_anew()
        return self._leave(self._ended(rows))

    def _decode(self) -> list[GenerationResult]:
        """Advances every running row by one token."""
        cache, rows_state = self._memory()
        count = len(self._running)
        longest = self._longest_offset + self._clock
        cache.define(count, longest)
        hidden = self._decoder.decode(*rows_state.inputs(count), longest, cache)
        rows_state.sample(self._decoder.logits(hidden), slice(0, count))
        rows_state.advance(count)
        self._clock += 1
        self._tokens_made += count
        return self._leave(self._ended(slice(0, count)))

    def _ended(self, rows: slice) -> dict[int, FinishReason]:
        """The rows among ``rows`` whose newest token was their last, and why."""
        ended: dict[int, FinishReason] = {}
        if self._clock >= self._next_limit:
            for row, entry in enumerate(self._running[rows], rows.start):
                if self._clock - entry.started >= entry.limit:
                    ended[row] = "length"
        for row in self._memory()[1].stopped(rows):
            ended[row] = "stop"
        return ended

    def _leave(self, ended: dict[int, FinishReason]) -> list[GenerationResult]:
        """Takes rows out of the running set and closes the gaps with the last rows."""
        if not ended:
            return []
        cache, rows_state = self._memory()
        results = [self._result(self._running[row], ended[row]) for row in sorted(ended)]
        remaining = len(self._running) - len(ended)
        gaps = [row for row in sorted(ended) if row < remaining]
        movers = [row for row in range(remaining, len(self._running)) if row not in ended]
        for row in ended:
            rows_state.release(self._running[row].slot)
        if movers:
            cache.move(movers, gaps)
            rows_state.move(movers, gaps)
            for mover, gap in zip(movers, gaps, strict=True):
                self._running[gap] = self._running[mover]
        del self._running[remaining:]
        if not self._running:
            cache.clear()
            rows_state.clear()
        self._count_anew()
        return results

    def _count_anew(self) -> None:
        """What ``step`` needs to know of all running requests, without looking at each of them."""
        self._longest_offset = max((entry.length_offset for entry in self._running), default=0)
        self._next_limit = min((entry.started + entry.limit for entry in self._running), default=0)

    def _result(self, entry: _Running, reason: FinishReason) -> GenerationResult:
        count = self._clock - entry.started
        ids, log_probs = self._memory()[1].read(entry.slot, count)
        begun = entry.request.begun
        versions = np.empty(count, np.int32)
        versions[: len(begun)] = begun.versions
        for start, version in entry.segments:
            versions[start:] = version
        made = Tokens.sampled(ids, log_probs, versions)
        # What it brought along keeps all that is known of it.
        tokens = Tokens.joined([begun, made[len(begun) :]]) if len(begun) else made
        return GenerationResult(entry.request.id, tokens, reason, prefilled=entry.prefilled)

    @torch.inference_mode()
    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[FloatArray]:
        if self._asleep:
            raise EngineError("torch engine: score() was called while it sleeps; call wake() first")
        for index, (prompt, response) in enumerate(sequences):
            if not prompt or len(prompt) + len(response) > self._context:
                raise ValueError(
                    f"score: sequence {index} has {len(prompt)} prompt and {len(response)} response tokens; it needs a "
                    f"prompt, and a total of at most {self._context}"
                )
        return scoring.score(self._decoder, sequences, temperature)

    # ------------------------------------------------------------------ weights

    def resident(self, in_any_order: bool = False) -> Resident | None:
        """None for weights that are shared with the learner, which looks at them itself."""
        return None if self._shared else resident(self._decoder.tensors.items(), in_any_order=in_any_order)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters in use by Hugging Face name. What writes into them directly also passes them to ``load``."""
        return self._decoder.tensors

    def begin_update(self) -> None:
        self._updating = True
        self._manifest = None
        self._loaded = set()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if not self._updating:
            raise EngineError("torch engine: load() before begin_update()")
        if self._shared:
            raise EngineError("torch engine: it shares the learner's weights, so nothing can be loaded into it")
        for name, tensor in tensors:
            if name == "lm_head.weight" and self._config.tied:
                continue
            target = self._decoder.tensors.get(name)
            if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
                expected = "no such parameter" if target is None else _described(target)
                raise EngineError(
                    f"torch engine: received {name} of {_described(tensor)}, but its model has {expected}; "
                    "learner and engine must be built from the same model folder and publish in the engine's dtype"
                )
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)
            self._loaded.add(name)

    def finish_update(self, version: int, manifest: Manifest) -> None:
        """Serves ``version``. Running requests go on with the keys and values they have."""
        missing = self._decoder.tensors.keys() - self._loaded
        if missing and not self._shared:
            raise EngineError(
                f"torch engine: the update to version {version} lacks {len(missing)} parameters, first {min(missing)}"
            )
        self._updating = self._gone = False
        self._version, self._manifest = version, manifest
        for entry in self._running:
            entry.segments.append((self._clock - entry.started, version))

    @property
    def weight_ranks(self) -> int:
        return 1

    def join_weights(self, link: WeightLink, first_rank: int, timeout: float) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = Receiver(link, first_rank, timeout=timeout, device=self._device)

    def receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        self.begin_update()
        if self._receiver is None:
            raise EngineError("torch engine: asked to receive weights before it joined a weight group")
        report = self._receiver.receive(version, self.load, self._decoder.tensors.get, timeout)
        assert self._receiver.manifest is not None
        self.finish_update(version, self._receiver.manifest)
        return report

    # ------------------------------------------------------------------ memory

    def _memory(self) -> tuple[KVCache, RowState]:
        assert self._cache is not None
        assert self._rows is not None
        return self._cache, self._rows

    def _bytes_per_token(self) -> int:
        config = self._config
        return KVCache.bytes_per_token(config.layers, config.kv_heads, config.head_dim, self._decoder.dtype)

    def _rows_at(self, capacity: int) -> int:
        """How many sequences of ``capacity`` tokens the memory holds."""
        return min(self._max_concurrent, self._kv_bytes // (capacity * self._bytes_per_token()))

    def _make_room(self, capacity: int, response: int) -> None:
        """A cache with ``capacity`` tokens per row and output of ``response`` tokens per slot."""
        config = self._config
        if self._cache is None or self._cache.capacity < capacity:
            # A little more than needed, so that a slightly longer prompt does not copy everything again.
            roomy = min(self._context, (capacity + 31) // 32 * 32)
            if self._rows_at(roomy) < self._rows_at(capacity):
                roomy = capacity
            rows = self._rows_at(roomy)
            cache = KVCache(
                config.layers, rows, config.kv_heads, roomy, config.head_dim, self._decoder.dtype, self._device
            )
            if self._cache is not None:
                cache.take_over(self._cache, len(self._running))
            self._cache = cache
        if self._rows is None:
            self._rows = RowState(self._max_concurrent, response, config.vocabulary, self._device)
        elif self._rows.width < response:
            self._rows.widen(response)

    @torch.inference_mode()
    def sleep(self, keep_weights: bool = True) -> None:
        """Frees the cache; weights of its own go to host memory, where they are kept in any case. Running requests keep
        their tokens and are prefilled again after ``wake``."""
        requests = {entry.request.id: entry.request for entry in self._running}
        for partial in reversed(self._leave(dict.fromkeys(range(len(self._running)), "aborted"))):
            self._waiting.appendleft(continued(requests[partial.id], partial))
        self._cache = None
        self._rows = None
        self._asleep = True
        if not keep_weights:
            self._gone, self._manifest = True, None
        self._move_weights(torch.device("cpu"))
        if self._device.type == "cuda":
            # Whoever takes the memory now would split what the allocator keeps for a cache.
            torch.cuda.empty_cache()

    def wake_weights(self) -> None:
        self._move_weights(self._device)

    def wake(self) -> None:
        """The cache comes back with the first request."""
        if self._gone:
            raise EngineError("torch engine: wake() before the update that sleep(keep_weights=False) needs")
        self.wake_weights()
        self._asleep = False

    @torch.inference_mode(mode=False)
    def _move_weights(self, device: torch.device) -> None:
        """Shared ones are the learner's to move."""
        if not self._shared:
            for tensor in self._decoder.tensors.values():
                # The decoder's layers hold these very objects.
                tensor.data = tensor.data.to(device)

    def close(self) -> None:
        self.abort()
        self._cache = None
        self._rows = None


def _described(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and {tensor.dtype}"
