"""The token ids of a growing chat, in which what the model said is never tokenised again.

    chat = Conversation(template, prompt)
    asked = chat.context(messages)         # asked.ids is what the model is to see
    answer = chat.answered(asked, said)    # the message that it said, to go on from

A chat template renders messages to text, and the text has other token ids than those that the model sampled: a word may
be cut in another way. So messages that continue an answered chat are rendered with it, the text of what was there is
taken off, and the ids of the rest are put behind those that the model saw and said. What was there is the text that the
model saw and said, or what the template makes of the same messages when nothing follows (some open every answer with
a place to think, and leave it out of history). Where it is neither (thinking itself is left out, say), or somebody
rewrote the history, the whole is rendered and tokenised anew: the episode branches there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rljob_trainer.episodes.episode import Prompt

Message = Mapping[str, Any]


class ChatFormat(Protocol):
    """Messages, text and token ids (``data/chat.py``)."""

    @property
    def is_there(self) -> bool:
        """Whether messages can be rendered."""
        ...

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of text that a token can stand for at most."""
        ...

    @property
    def answer_end(self) -> str:
        """What is written between an answer's content and the next message."""
        ...

    @property
    def marks_end(self) -> bool:
        """Whether that begins with a special token."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, generation: bool = True
    ) -> str:
        """The text of messages, with what comes before an answer or without. Raises whatever the template raises."""
        ...

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ...

    def without_special(self, text: str) -> str:
        """A text in which the names of special tokens are broken up."""
        ...

    def ends_answer(self, token_id: int) -> bool:
        """Whether the model ends its answers with it."""
        ...


class Asked(NamedTuple):
    """What the model is asked, as it was then: who asked may go on to change the messages, or ask something else before
    the answer is there."""

    ids: tuple[int, ...]
    text: str
    """What the model sees: what it saw and said before, as it was, and what is new."""
    messages: Sequence[Message]
    written: tuple[str, ...]
    """Each of ``messages`` in JSON."""
    tools: str


class Rendered(NamedTuple):
    """What the model is asked, before its new part is tokenised."""

    text: str
    """All that the model is to see."""
    known: tuple[int, ...]
    """The token ids of what it saw and said before."""
    new: str
    """The text behind that."""
    ended: bool
    """Whether the model ended with a token what it said before."""
    messages: Sequence[Message]
    written: tuple[str, ...]
    """Each of ``messages`` in JSON."""
    tools: str


class _Answered(NamedTuple):
    """A chat up to one of the model's answers."""

    messages: tuple[str, ...]
    """Each in JSON; the last one is the answer."""
    tools: str
    ids: tuple[int, ...]
    text: str
    """What the model saw and said."""
    ended: bool
    """By the model itself, with a token for it."""


class Conversation:
    """The chat of one episode, with its branches."""

    def __init__(self, chat: ChatFormat, prompt: Prompt) -> None:
        self._chat = chat
        self._prompt = prompt
        self._begins_with = _written(prompt.messages)
        self._answered: list[_Answered] = []
        self.branches = 0
        """How often a context did not continue what the model had seen and said."""
        self.messages: Sequence[Message] = ()
        """The chat up to the latest answer."""

    def context(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> Asked:
        """What the model is to see. Raises as ``rendered``."""
        return self.tokenised(self.rendered(messages, tools))

    def rendered(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> Rendered:
        """What the model is to see, its new part as text. Raises ``TypeError`` for messages that are no JSON,
        ``ValueError`` where there is no chat template or it cannot render them."""
        written, told = _written(messages), _json(tools, "the tools")
        kept = [dict(message) for message in messages]
        if not self._answered and tools is None and written == self._begins_with:
            return Rendered(self._prompt.text, self._prompt.token_ids, "", False, kept, written, told)
        before = max(
            (a for a in self._answered if a.tools == told and written[: len(a.messages)] == a.messages),
            key=lambda answered: len(answered.messages),
            default=None,
        )
        text = self._rendered(messages, tools)
        if before is not None and len(before.messages) < len(written):
            head: str | None = before.text
            if not text.startswith(before.text):
                head = self._without_end(messages[: len(before.messages)], tools)
            if head is not None and text.startswith(head):
                rest = text[len(head) :]
                return Rendered(before.text + rest, before.ids, rest, before.ended, kept, written, told)
        self.branches += bool(self._answered)
        return Rendered(text, (), text, False, kept, written, told)

    def tokenised(self, rendered: Rendered) -> Asked:
        """In any thread: it takes a second for a few megabytes of text."""
        ids = rendered.known
        if rendered.new:
            new = self._chat.encode(rendered.new)
            # A template ends an answer with a token that the model has said already.
            ids = (*ids, *(new[1:] if rendered.ended and self._chat.marks_end else new))
        return Asked(ids, rendered.text, rendered.messages, rendered.written, rendered.tools)

    def least_tokens(self, rendered: Rendered) -> int:
        """As many token ids as it has at least, by its length."""
        return len(rendered.known) + len(rendered.new) // self._chat.longest_token

    def answered(self, asked: Asked, said: Sequence[int]) -> dict[str, Any]:
        """``said`` is the model's answer. Returns it as a message."""
        answer = {"role": "assistant", "content": self._chat.decode(said)}
        ended = bool(said) and self._chat.ends_answer(said[-1])
        self.messages = [*asked.messages, answer]
        written, text = (*asked.written, _json(answer, "an answer")), asked.text + answer["content"]
        self._answered.append(_Answered(written, asked.tools, (*asked.ids, *said), text, ended))
        return dict(answer)

    def _without_end(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str | None:
        """Messages that end with an answer, up to its content's end; None: the template writes something else there."""
        text, end = self._rendered(messages, tools, generation=False), self._chat.answer_end
        return text.removesuffix(end) if text.endswith(end) else None

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, generation: bool = True
    ) -> str:
        if not self._chat.is_there:
            raise ValueError("the model has no chat template; set spec.model.chatTemplate, or pass token ids")
        try:
            return self._chat.render(messages, tools, generation=generation)
        except Exception as error:
            # Templates raise what they like: "roles must alternate", or what Python says of a list plus a text.
            raise ValueError(f"the chat template cannot render the messages ({error})") from error


def _written(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(_json(message, "a message") for message in messages)


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be plain data that JSON can represent: {error}") from error
