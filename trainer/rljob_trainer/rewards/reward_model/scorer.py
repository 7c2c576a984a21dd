"""The reward model itself, in a process of its own: rows of chat messages to scores, some rows at a time.

Rows are padded on the right to the longest of their batch, by a token that leaves transformers' own choice of the last
token of a row as it is when the row is alone: scores do not depend on the company.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.tokenizer import load_tokenizer
from rljob_trainer.rewards.reward_model.replica import ScorerLostError
from rljob_trainer.rewards.reward_model.served import ServedModel
from rljob_trainer.rewards.verdicts import described_error

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_OF_THE_DATA = ("system", "developer", "user")
"""Roles of messages that a policy has no say in, as long as it has not answered."""

Row = Sequence[Mapping[str, str]]
"""Chat messages, the last of which is the response."""


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """What the process is told first."""

    folder: Path
    field: str
    """Of the job file, for messages."""
    dtype: str
    batch_tokens: int
    max_length: int | None
    trust_remote_code: bool
    device: str = "cpu"


def settings_of(model: ServedModel, device: str) -> ScorerSettings:
    """Where the model is on this node, and how it is computed. Raises ``JobFileError`` when it is not there."""
    spec, files = model.spec, model.files
    return ScorerSettings(
        files.folder(), files.field, spec.dtype, spec.batch_tokens, spec.max_length, spec.trust_remote_code, device
    )


class Scorer:
    """Loads on creation. Raises ``JobFileError`` for what is no reward model."""

    def __init__(self, settings: ScorerSettings) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._batch_tokens = settings.batch_tokens
        try:
            self._tokenizer: Any = load_tokenizer(settings.folder, trust_remote_code=settings.trust_remote_code)
            how: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "local_files_only": True}
            config = AutoConfig.from_pretrained(settings.folder, **how)
            if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
                # Transformers' default would leave the cap out without a word; this is its only attention that has one.
                how["attn_implementation"] = "eager"
            self._model, info = AutoModelForSequenceClassification.from_pretrained(
                settings.folder, dtype=_DTYPES[settings.dtype], output_loading_info=True, **how
            )
        except JobFileError as problem:
            raise JobFileError(f"{settings.field}: {problem}") from problem
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as problem:
            first = (str(problem).strip().splitlines() or [""])[0]
            raise JobFileError(
                f"{settings.field}: {settings.folder} cannot be loaded as a sequence classification "
                f"({type(problem).__name__}: {first}); use a model that was trained as a reward model"
            ) from problem
        if missing := sorted(info["missing_keys"]):
            raise JobFileError(
                f"{settings.field}: {settings.folder} has no weights for {', '.join(missing[:3])}: it is a language "
                "model without a scoring head; use a model that was trained as a reward model"
            )
        if (labels := self._model.config.num_labels) != 1:
            raise JobFileError(f"{settings.field}: {settings.folder} has num_labels {labels}; num_labels must be 1")
        self._model.eval().to(settings.device)
        self._device = settings.device
        self._padding = self._model.config.get_text_config().pad_token_id
        own = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self.longest: int | None = settings.max_length or own
        self._special = [
            token.content for token in self._tokenizer.added_tokens_decoder.values() if len(token.content) > 1
        ]

    def scores(self, rows: Sequence[Row]) -> tuple[list[float | str], int]:
        """A score or a problem for each row, and the tokens of all rows. Raises ``ScorerLostError`` when the model has
        raised and its device computes nothing any more, so that no row is blamed; and what the model raises."""
        scores: list[float | str] = ["" for _ in rows]
        ids: list[list[int]] = [[] for _ in rows]
        fitting = []
        for index, messages in enumerate(rows):
            try:
                row = ids[index] = self._ids(messages)
            except Exception as problem:  # noqa: BLE001  a chat template may raise anything, about this row alone
                scores[index] = f"the reward model's tokenizer or chat template fails: {described_error(problem)}"
                continue
            if self.longest is not None and len(row) > self.longest:
                scores[index] = (
                    f"prompt and response have {len(row)} tokens of the reward model, more than its {self.longest} "
                    "(rewardModel.maxLength); lower maxResponseTokens, or use a model with a longer context"
                )
            elif not row:
                scores[index] = "prompt and response have no tokens"
            else:
                fitting.append(index)
        for batch in self._batches(fitting, ids):
            try:
                found = self._forward([ids[index] for index in batch])
            except Exception as problem:
                self._check_device(problem)
                raise
            for index, score in zip(batch, found, strict=True):
                scores[index] = score if math.isfinite(score) else f"the reward model gave {score}"
        return scores, sum(len(ids[index]) for index in fitting)

    def _batches(self, indices: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Rows of similar length together, padded at most ``batch_tokens``; a longer row is alone."""
        batch: list[int] = []
        for index in sorted(indices, key=lambda index: len(ids[index])):
            if batch and (len(batch) + 1) * len(ids[index]) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _check_device(self, problem: Exception) -> None:
        """Whether it still computes after this: some errors of CUDA stay until the process ends, whatever is asked."""
        try:
            works = float(torch.ones((), device=self._device) + 1) == 2
        except RuntimeError:
            works = False
        if not works:
            raise ScorerLostError(f"its device failed with {described_error(problem)}") from problem

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest, padding = max(map(len, rows)), self._padding
        if padding is None:
            # Transformers takes the last token that is no padding for a row's end: any but those will do.
            ends = {row[-1] for row in rows}
            padding = next(number for number in range(len(ends) + 1) if number not in ends)
        self._model.config.get_text_config().pad_token_id = padding
        ids = torch.full((len(rows), longest), padding)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return [float(score) for score in logits[:, 0].float()]

    def _ids(self, row: Row) -> list[int]:
        messages = self._confined(row)
        if self._tokenizer.chat_template is None:
            text = "".join(message["content"] for message in messages)
            return list(self._tokenizer(text)["input_ids"])
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _confined(self, row: Row) -> Row:
        """The messages, of which none that the policy has a say in can end itself or begin another one: its own, what
        tools and sandboxes answer, and all that follows, which may repeat them."""
        messages: list[Mapping[str, str]] = []
        asked = True
        for place, message in enumerate(row):
            asked = asked and message["role"] in _OF_THE_DATA and place < len(row) - 1
            messages.append(message if asked else {**message, "content": self._without_special(message["content"])})
        return messages

    def _without_special(self, text: str) -> str:
        """Names of special tokens are broken up by a space."""
        for name in self._special:
            if name in text:
                text = text.replace(name, f"{name[0]} {name[1:]}")
        return text
