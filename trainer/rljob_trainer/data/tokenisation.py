"""From a row to prompt token ids: template or column, chat template, length limit.

Tokenises whole blocks at a time (the fast tokenizers run a block in parallel), never a whole data set: the feed
asks for the rows that come next. Chat templates are rendered to text first and tokenised without adding special
tokens again, so what is logged as the prompt's text is exactly what was tokenised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from rljob_trainer.data.chat import ChatTemplate, text_encoder
from rljob_trainer.data.columns import (
    NullColumnError,
    Row,
    Template,
    as_text,
    column,
    half_a_character,
    is_template,
    lacks_column,
    null_column,
    require_columns,
)
from rljob_trainer.errors import DataError, JobFileError
from rljob_trainer.texts import lone_surrogate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatMode = Literal["auto", "always", "never"]
Overlong = Literal["drop", "error", "truncate"]

_OF_TOOLS = ("tool", "function", "ipython")
"""Roles in which chat templates expect what a tool said."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt ready for an engine. ``text`` is what was tokenised (before truncation, if there was one)."""

    text: str
    token_ids: tuple[int, ...]
    answer: str | None
    columns: Row
    """The whole row, for custom reward functions."""
    truncated: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()
    """What the chat template has made the text of; empty without one."""
    reference: Any = None
    """The cell that ``answer`` is the text of."""
    conversational: bool = False
    """The row's prompt is chat messages, and no text."""


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How rows become prompts: the fields of ``spec.data`` that concern one row."""

    prompt: str
    """A column (or dotted path) or a ``{template}``. A column may hold chat messages (``role``, ``content``)."""
    answer: str | None = None
    chat: ChatMode = "auto"
    system_prompt: str | None = None
    max_tokens: int = 1024
    overlong: Overlong = "drop"
    """``truncate`` keeps the last ``max_tokens`` tokens: the question usually stands at the end."""
    prompt_field: str = "spec.data.prompt"
    answer_field: str = "spec.data.answer"
    """Where the job file says so, for messages."""


class PromptEncoder:
    """Turns rows into ``EncodedPrompt``."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings, now: datetime | None = None
    ) -> None:
        """``now``: the date in all prompts of a chat template that writes one; None: the present date.

        Raises ``JobFileError`` when the settings ask for a chat template that the tokenizer lacks.
        """
        self.tokenizer = tokenizer
        self.settings = settings
        self._template = Template(settings.prompt, settings.prompt_field) if is_template(settings.prompt) else None
        self._chat = ChatTemplate(tokenizer, now=now)
        if settings.chat == "always" and not self._chat.is_there:
            raise JobFileError(
                "spec.data.chat: always needs a tokenizer with a chat template, but the model's has none; "
                "set spec.model.chatTemplate, or use chat: never"
            )
        self.uses_chat = settings.chat == "always" or (settings.chat == "auto" and self._chat.is_there)
        if settings.system_prompt and not self.uses_chat:
            raise JobFileError(
                "spec.data.systemPrompt needs a chat template, but none is applied here; "
                f"put the text into the template of {settings.prompt_field} instead"
            )
        # A chat template writes the special tokens itself.
        self._ids_of = text_encoder(tokenizer, add_special_tokens=not self.uses_chat)
        self._ids_of_text_alone = text_encoder(tokenizer, add_special_tokens=False)

    @property
    def date(self) -> str | None:
        """The date and time in prompts, as ISO 8601 has it; None where no prompt has any."""
        return self._chat.date if self.uses_chat else None

    def check_columns(self, present: Iterable[str], where: str) -> None:
        """Raises ``JobFileError`` naming the columns that prompt and answer need and ``where`` lacks."""
        present = tuple(present)
        for field, names in self._named.items():
            require_columns(names, present, field, where)

    @property
    def needed(self) -> list[tuple[str, str]]:
        """The columns that prompt and answer need, each with the field of the job file that names it."""
        return [(name, field) for field, names in self._named.items() for name in names]

    @property
    def never_null(self) -> list[tuple[str, str]]:
        """The columns that must not be null: a sample may lack an answer, if its reward needs none."""
        return [(name, field) for name, field in self.needed if field == self.settings.prompt_field]

    @property
    def _named(self) -> dict[str, tuple[str, ...]]:
        return {
            self.settings.prompt_field: self._template.columns if self._template else (self.settings.prompt,),
            self.settings.answer_field: () if self.settings.answer is None else (self.settings.answer,),
        }

    def encode(self, rows: Sequence[Row], places: Sequence[str]) -> list[EncodedPrompt | None]:
        """One entry per row; None where an overlong prompt is dropped.

        ``places`` says where each row is from, for messages. Raises ``DataError`` naming the row.
        """
        contents = [
            prompt_content(
                row,
                place,
                self.settings.prompt,
                self._template,
                uses_chat=self.uses_chat,
                field=self.settings.prompt_field,
            )
            for row, place in zip(rows, places, strict=True)
        ]
        system_prompt = self.settings.system_prompt if self.uses_chat else None
        asked = [as_messages(content, system_prompt) for content in contents]
        texts = [self._text(each, place) for each, place in zip(asked, places, strict=True)]
        for text, place in zip(texts, places, strict=True):
            if escape := lone_surrogate(text):
                raise half_a_character(place, self.settings.prompt, escape)
        encoded = [
            self._fit(text, ids, row, place)
            for text, ids, row, place in zip(texts, self._ids_of(texts), rows, places, strict=True)
        ]
        if not self.uses_chat:
            return encoded
        return [
            None
            if prompt is None
            else replace(prompt, messages=tuple(messages), conversational=isinstance(content, list))
            for prompt, messages, content in zip(encoded, asked, contents, strict=True)
        ]

    def _text(self, messages: list[dict[str, Any]], place: str) -> str:
        if not self.uses_chat:
            return as_text(messages[0]["content"])
        try:
            return self._chat.render(messages)
        except Exception as error:
            # Templates raise what they like: "roles must alternate", or what Python says of a list plus a text.
            raise cannot_be_rendered(place, error) from error

    def _fit(self, text: str, ids: list[int], row: Row, place: str) -> EncodedPrompt | None:
        if self.tokenizer.unk_token_id in ids and self._has_unknown_characters(text):
            raise unknown_characters(place, text)
        if not ids:
            raise DataError(f"{place}: the prompt has no tokens; remove the row or fill it in")
        truncated = len(ids) > self.settings.max_tokens
        if truncated:
            if self.settings.overlong == "drop":
                return None
            if self.settings.overlong == "error":
                raise DataError(
                    f"{place}: the prompt has {len(ids)} tokens, more than maxPromptTokens = "
                    f"{self.settings.max_tokens}; raise it, or set overlongPrompts: drop or truncate"
                )
            ids = ids[-self.settings.max_tokens :]
        answer, reference = self._answer(row, place)
        return EncodedPrompt(text, tuple(ids), answer, row, truncated, reference=reference)

    def _has_unknown_characters(self, text: str) -> bool:
        """Whether the token for what is unknown stands for anything but itself. It may be the one that begins or ends
        texts too (GPT-2's ``<|endoftext|>``), and written by a chat template."""
        (ids,) = self._ids_of_text_alone([text])
        return ids.count(self.tokenizer.unk_token_id) > text.count(self.tokenizer.unk_token)

    def _answer(self, row: Row, place: str) -> tuple[str | None, Any]:
        """The answer as text, and the cell itself."""
        if self.settings.answer is None:
            return None, None
        try:
            value = column(row, self.settings.answer)
        except KeyError:
            raise lacks_column(place, row, self.settings.answer, self.settings.answer_field) from None
        text = None if value is None else as_text(value)
        if text is not None and (escape := lone_surrogate(text)):
            raise half_a_character(place, self.settings.answer, escape)
        return text, value


def prompt_content(
    row: Row,
    place: str,
    prompt: str,
    template: Template | None,
    *,
    uses_chat: bool | None,
    field: str = "spec.data.prompt",
) -> str | list[dict[str, Any]]:
    """A row's prompt: text, or the chat messages that its column holds. ``template``: of ``prompt``, if it is one.

    ``uses_chat`` None: it is not known yet whether a chat template will be applied. ``field`` names it in the job file.
    Raises ``DataError`` naming the
    row.
    """
    try:
        content = template.render(row) if template else column(row, prompt)
    except KeyError as missing:
        raise lacks_column(place, row, str(missing.args[0]), field) from None
    except NullColumnError as null:
        raise null_column(place, str(null.args[0]), field) from None
    if content is None:
        raise null_column(place, prompt, field)
    messages = _messages(content)
    if messages is None:
        if isinstance(content, Sequence | Mapping) and not isinstance(content, str):
            raise _no_text(content, place, prompt, field)
        return as_text(content)
    if uses_chat is False:
        raise DataError(
            f"{place}: the prompt is a list of chat messages, but no chat template is applied; "
            "set spec.model.chatTemplate (or chat: always with a chat model)"
        )
    if not messages:
        raise DataError(f"{place}: the prompt is an empty list of chat messages; fill it in, or remove the row")
    for number, message in enumerate(messages):
        _check_message(message, f"{place}, message {number}")
    return messages


def as_messages(content: str | list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """What a chat template is given of a row's prompt."""
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return [{"role": "system", "content": system_prompt}, *messages] if system_prompt else messages


def cannot_be_rendered(place: str, error: Exception) -> DataError:
    """What is said of a prompt that the chat template raises ``error`` for."""
    return DataError(
        f"{place}: the chat template cannot render the prompt ({error}); correct the row or the template "
        "(spec.model.chatTemplate replaces the model's own)"
    )


def unknown_characters(place: str, text: str) -> DataError:
    """What is said of a prompt that the tokenizer has no tokens for."""
    return DataError(
        f"{place}: the tokenizer does not know every character of the prompt {text[:80]!r}; "
        "add them to spec.model.random.tokenizer.characters, or use another tokenizer"
    )


def _check_message(message: Mapping[str, Any], place: str) -> None:
    """Raises ``DataError`` for what templates would render as something else than what is meant."""
    role = message["role"]
    if not isinstance(role, str):
        raise DataError(f"{place}: its role must be text, not {as_text(role)[:60]!r}; use user, assistant or system")
    for name in ("tool_calls", "tool_call_id", "function_call"):
        if message.get(name):
            raise DataError(f"{place}: has {name}, but tool calls are not supported; remove the row")
    if role in _OF_TOOLS:
        raise DataError(f"{place}: has the role {role!r}, but tool messages are not supported; remove the row")
    if not isinstance(message.get("content"), str | Sequence):
        raise DataError(f"{place}: its content must be text; fill it in, or remove the row")


def _no_text(content: Sequence[Any] | Mapping[str, Any], place: str, name: str, field: str) -> DataError:
    """What is said of a cell that is neither text nor messages, and would be a prompt as Python writes it."""
    kind = type(content).__name__
    what = f"a {kind} ({str(content)[:60]})"
    if isinstance(content, Sequence) and not isinstance(content, bytes | bytearray):
        number, wrong = next((i, m) for i, m in enumerate(content) if not (isinstance(m, Mapping) and "role" in m))
        what = f"a list whose entry {number} is not a chat message with a role ({str(wrong)[:60]})"
    return DataError(
        f"{place}: column {name!r} ({field}) contains {what}; use text, a list of messages with role and "
        "content, or another column"
    )


def _messages(content: Any) -> list[dict[str, Any]] | None:
    """Chat messages, when the prompt column holds them."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return None
    if not all(isinstance(message, Mapping) and "role" in message for message in content):
        return None
    return [dict(message) for message in content]
