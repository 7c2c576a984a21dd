"""What the torch engine keeps per running request in tensors: its newest token, settings, random numbers and output.

Two geometries. *Rows* follow the cache and are moved with it: newest token, position, settings. *Slots* hold the output
and the random numbers of a request, ``[slots, width]``, and never move; a row knows its next cell in them. So one step
reads its uniforms and writes its tokens with one index, whatever the rows' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rljob_trainer.episodes.requests import GenerationRequest
from rljob_trainer.episodes.tokens import FloatArray, IntArray
from rljob_trainer.rollout.sampling import draw, uniforms

# Lines of the integer state.
_LAST, _POSITION, _CELL, _STOPS, _TOP_K, _GREEDY = range(6)
# Lines of the float state.
_TEMPERATURE, _TOP_P = range(2)


class RowState:
    """State of at most ``rows`` requests with at most ``width`` response tokens each."""

    def __init__(self, rows: int, width: int, vocabulary: int, device: torch.device) -> None:
        self.width = width
        self._vocabulary, self._device = vocabulary, device
        self._integers = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self._floats = torch.ones(2, rows, device=device)
        self._free = list(range(rows - 1, -1, -1))
        self._tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
        self._log_probs = torch.empty(rows, width, device=device)
        self._uniforms = torch.empty(rows, width, device=device)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)
        self.clear()

    def clear(self) -> None:
        """No row is in use: the next requests may again be all alike and take the shorter ways."""
        self._any_temperature = self._any_greedy = self._any_top = self._any_stop = False

    def enter(self, requests: Sequence[GenerationRequest], rows: slice, prefix_lengths: Sequence[int]) -> list[int]:
        """Gives each request a slot and fills ``rows``; returns the slots."""
        slots = [self._free.pop() for _ in requests]
        integers = np.empty((6, len(requests)), np.int64)
        floats = np.ones((2, len(requests)), np.float32)
        for i, (request, slot) in enumerate(zip(requests, slots, strict=True)):
            sampling = request.sampling
            greedy = sampling.temperature == 0
            integers[:, i] = (
                0,
                prefix_lengths[i],
                slot * self.width + len(request.begun),
                self._stop_set(sampling.stop_token_ids),
                sampling.top_k,
                greedy,
            )
            floats[:, i] = (1.0 if greedy else sampling.temperature, sampling.top_p)
            self._any_greedy |= greedy
            self._any_temperature |= not greedy and sampling.temperature != 1
            self._any_top |= sampling.top_k > 0 or sampling.top_p < 1
            self._any_stop |= bool(sampling.stop_token_ids)
            if so_far := len(request.begun):
                self._tokens[slot, :so_far] = torch.tensor(request.begun.ids)
                self._log_probs[slot, :so_far] = torch.tensor(request.begun.log_probs)
        self._integers[:, rows] = torch.from_numpy(integers).to(self._device)
        self._floats[:, rows] = torch.from_numpy(floats).to(self._device)
        length = max(request.sampling.max_tokens for request in requests)
        numbers = torch.from_numpy(uniforms([request.seed for request in requests], length)).to(self._device)
        self._uniforms[:, :length].index_copy_(0, torch.tensor(slots, device=self._device), numbers)
        return slots

    def _stop_set(self, stop_token_ids: tuple[int, ...]) -> int:
        """Where the set's line of the table begins in its flat view."""
        if stop_token_ids not in self._stop_sets:
            line = torch.zeros(1, self._vocabulary, dtype=torch.bool, device=self._device)
            # Ids beyond the vocabulary cannot be drawn.
            line[0, [token for token in stop_token_ids if 0 <= token < self._vocabulary]] = True
            self._stop_sets[stop_token_ids] = len(self._stop_table) * self._vocabulary
            self._stop_table = torch.cat((self._stop_table, line))
        return self._stop_sets[stop_token_ids]

    def inputs(self, count: int) -> tuple[Tensor, Tensor]:
        """The newest token of the first ``count`` rows and its position, both ``[count]``."""
        return self._integers[_LAST, :count], self._integers[_POSITION, :count]

    def sample(self, logits: Tensor, rows: slice) -> None:
        """Draws the next token of ``rows`` from ``logits [n, V]`` (overwritten) and records it."""
        integers, floats = self._integers[:, rows], self._floats[:, rows]
        cell = integers[_CELL]
        tokens, log_probs = draw(
            logits,
            self._uniforms.view(-1).take(cell),
            temperature=floats[_TEMPERATURE] if self._any_temperature else None,
            greedy=integers[_GREEDY].bool() if self._any_greedy else None,
            top_k=integers[_TOP_K] if self._any_top else None,
            top_p=floats[_TOP_P] if self._any_top else None,
        )
        self._tokens.view(-1).index_copy_(0, cell, tokens)
        self._log_probs.view(-1).index_copy_(0, cell, log_probs)
        integers[_LAST] = tokens
        cell += 1

    def advance(self, count: int) -> None:
        """The newest tokens of the first ``count`` rows are in the cache; the next ones lie one further."""
        self._integers[_POSITION, :count] += 1

    def stopped(self, rows: slice) -> list[int]:
        """The rows among ``rows`` whose newest token is one of their stop tokens."""
        if not self._any_stop:
            return []
        hit = self._stop_table.view(-1).take(self._integers[_STOPS, rows] + self._integers[_LAST, rows])
        return [rows.start + index for index in hit.nonzero().view(-1).tolist()] if bool(hit.any()) else []

    def read(self, slot: int, count: int) -> tuple[IntArray, FloatArray]:
        """The response so far: token ids and log-probs, ``[count]``, copied."""
        tokens, log_probs = self._tokens[slot, :count], self._log_probs[slot, :count]
        return tokens.to("cpu", torch.int32).numpy(), log_probs.to("cpu", copy=True).numpy()

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def move(self, source: list[int], target: list[int]) -> None:
        """Copies rows onto other rows (their slots stay where they are)."""
        self._integers[:, target] = self._integers[:, source]
        self._floats[:, target] = self._floats[:, source]

    def widen(self, width: int) -> None:
        """Makes room for ``width`` response tokens per slot."""
        cells = self._integers[_CELL]
        self._integers[_CELL] = cells // self.width * width + cells % self.width
        for name in ("_tokens", "_log_probs", "_uniforms"):
            old: Tensor = getattr(self, name)
            new = torch.empty(old.shape[0], width, dtype=old.dtype, device=old.device)
            new[:, : self.width] = old
            setattr(self, name, new)
        self.width = width
