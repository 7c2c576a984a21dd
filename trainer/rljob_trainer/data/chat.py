"""Chat messages and token ids: a tokenizer's chat template, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rljob_trainer.texts import writable

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

_CLOCK = "strftime_now"
"""What transformers gives a chat template for the present date. A template's variables come before such functions."""
_WORTH_THREADS = 4096
"""Tokens from which on a tokenizer's threads are faster than one: half a millisecond's work."""
_CONTROL = re.compile(r"<[|｜].*[|｜]>")
_CONTENT = "cbacab"
"""An answer's content, to find what a template writes behind one. Letters alone: no template changes them."""


class ChatTemplate:
    """A tokenizer with its chat template, if it has one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Collection[int] = (), now: datetime | None = None
    ) -> None:
        """``stop_token_ids``: with which the model ends an answer. ``now``: the date that templates write which write
        one; None: the present date."""
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        added = {id: token for id, token in tokenizer.added_tokens_decoder.items() if _steers(token)}
        self._special = self._stops | frozenset(tokenizer.all_special_ids) | added.keys()
        names = [*tokenizer.all_special_tokens, *(token.content for token in added.values())]
        self._special_names = [name for name in dict.fromkeys(names) if len(name) > 1]
        self._now = now or datetime.now()
        self._decode = _decoder(tokenizer, skip_special_tokens=True)
        self._encode = text_encoder(tokenizer, add_special_tokens=False)
        template = getattr(tokenizer, "chat_template", None)
        self.is_there = template is not None
        """Whether messages can be rendered."""
        self.date = self._now.isoformat() if self.is_there and _CLOCK in str(template) else None
        """The date and time in messages, as ISO 8601 has it; None where no message has any."""
        self.vocabulary = len(tokenizer)
        """Token ids are below it."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation: bool = True,
    ) -> str:
        """The text of messages (``role``, ``content``); ``tools`` as JSON schemas of functions. ``generation``: with
        what comes before an answer. A template raises what it likes."""
        clock: dict[str, Any] = {} if self.date is None else {_CLOCK: self._now.strftime}
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            add_generation_prompt=generation,
            **clock,
        )
        assert isinstance(rendered, str)
        return writable(rendered)  # half a character in a message, which no tokenizer takes

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without tokens that it does not name."""
        (ids,) = self._encode([text])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._decode([list(ids)])[0]

    def without_special(self, text: str) -> str:
        """A text in which the names of special tokens are broken up by a space, so that it cannot end its own message,
        or begin another: the tokenizer would read them as these tokens."""
        for name in self._special_names:
            if name in text:
                text = text.replace(name, f"{name[0]} {name[1:]}")
        return text

    def ends_answer(self, token_id: int) -> bool:
        """Whether the model ends its answers with it."""
        return token_id in self._stops

    @cached_property
    def longest_token(self) -> int:
        """Characters of text that a token can stand for at most."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def answer_end(self) -> str:
        """What the template writes between an answer's content and the next message."""
        asked = [{"role": "user", "content": _CONTENT}, {"role": "assistant", "content": _CONTENT}]
        return self.render(asked, generation=False).rpartition(_CONTENT)[2]

    @cached_property
    def marks_end(self) -> bool:
        """Whether that begins with a special token, which the model is to end its answers with."""
        ids = self.encode(self.answer_end)
        return bool(ids) and ids[0] in self._special

    @cached_property
    def drops_history(self) -> bool:
        """Whether an answer is rendered otherwise when more messages follow it: a template that leaves the thinking of
        former turns out, for example. Then each turn is a sequence of its own to train on."""
        answer = f"<think>\n{_CONTENT}\n</think>\n\n{_CONTENT}"
        asked = [{"role": "user", "content": _CONTENT}, {"role": "assistant", "content": answer}]
        head = self.render(asked, generation=False).removesuffix(self.answer_end)
        return not self.render([*asked, {"role": "user", "content": _CONTENT}]).startswith(head)


def _steers(token: AddedToken) -> bool:
    """Whether an added token is one of those that give a chat its form. Llama 3 names few of its own as special, and
    DeepSeek marks ``<｜User｜>`` as ordinary; runs of blanks and HTML, which others add, are text."""
    return token.special or _CONTROL.fullmatch(token.content) is not None


def response_decoder(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Collection[int]
) -> Callable[[list[list[int]]], list[str]]:
    """The texts of responses, with all special tokens that the model generated but those that end an answer.

    A reward function that did not see them would reward an answer that nobody else would read like that.
    """
    decode = _decoder(tokenizer, skip_special_tokens=False)
    stops = frozenset(stop_token_ids)

    def without_stops(ids: list[int]) -> list[int]:
        ids = ids[:-1] if ids and ids[-1] in stops else ids
        return ids if stops.isdisjoint(ids) else [id for id in ids if id not in stops]

    return lambda responses: decode(list(map(without_stops, responses)))


def _decoder(
    tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool
) -> Callable[[list[list[int]]], list[str]]:
    """As ``tokenizer.batch_decode``, which checks every token of every text for being a tensor: that costs more than
    decoding. A fast tokenizer decodes lists itself, unless its texts are to be cleaned up afterwards: few tokens one
    list after the other, since waking its threads takes longer than that.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return lambda responses: list(
            map(writable, tokenizer.batch_decode(responses, skip_special_tokens=skip_special_tokens))
        )

    def quick(responses: list[list[int]]) -> list[str]:
        if sum(map(len, responses)) < _WORTH_THREADS:
            return [backend.decode(ids, skip_special_tokens=skip_special_tokens) for ids in responses]
        texts: list[str] = backend.decode_batch(responses, skip_special_tokens=skip_special_tokens)
        return texts

    return quick


def text_encoder(
    tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> Callable[[list[str]], list[list[int]]]:
    """The ids of texts, as ``tokenizer(texts, truncation=False)["input_ids"]`` gives them.

    That call also makes masks, and notes where in its text each token stands. A fast tokenizer does without, unless
    its class has a way of its own.
    """
    from transformers import PreTrainedTokenizerFast

    def general(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens, truncation=False)["input_ids"]
        return ids

    methods = ("__call__", "_encode_plus")
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in methods
    ):
        return general

    def quick(texts: list[str]) -> list[list[int]]:
        backend = tokenizer.backend_tokenizer
        if backend.truncation or backend.padding or backend.encode_special_tokens != tokenizer.split_special_tokens:
            # Left behind by another use; the general way puts it right for the blocks that follow.
            return general(texts)
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    return quick
