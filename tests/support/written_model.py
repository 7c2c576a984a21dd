"""A model that says what a test has written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from published_chats import FAMILIES, chat_of, letters_of

from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import Tokens

CHAT = chat_of(FAMILIES[0])
END = CHAT.encode("<|im_end|>")


class Written:
    """A model that says one text after the other, letter by letter, and ends each itself."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.seen: list[str] = []

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> GenerationResult:
        self.seen.append(CHAT._tokenizer.decode(list(request.prompt_ids)))
        said = [*letters_of(CHAT, self.texts[request.id.turn]), *END]
        ids, finish = np.array(said[: request.sampling.max_tokens], np.int32), "stop"
        if len(said) > request.sampling.max_tokens:
            finish = "length"
        tokens = Tokens.sampled(ids, np.full(len(ids), -1.0, np.float32), np.full(len(ids), 3, np.int32))
        return GenerationResult(request.id, tokens, finish)  # type: ignore[arg-type]


class Hangs(Written):
    """Never says a second text."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.asked_again = asyncio.Event()

    async def generate(self, requests: Sequence[GenerationRequest], finished: Any = None) -> list[GenerationResult]:
        if requests[0].id.turn == 1:
            self.asked_again.set()
            await asyncio.Event().wait()
        return await super().generate(requests, finished)
