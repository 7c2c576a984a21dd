"""What an agent has asked in one episode, as it goes on record: each request, less what it shares with the one before.

    journal = RequestJournal()
    entry = journal.add(messages, tools, max_tokens)
    for turn in turns_of(json.loads(json.dumps(journal.entries))): ...

An agent sends the whole chat with every request. A record of that would grow with the square of the turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]


class ChatTurn(NamedTuple):
    """One question to the model, as ``Voice.chat`` takes it."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None
    max_tokens: int | None


class RequestJournal:
    """The questions of one episode, in the order in which the model was asked."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        """Plain data, which JSON can hold."""
        self._before: Sequence[Message] = ()
        self._tools: Sequence[Message] | None = None

    def add(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        """A question is about to be asked. Returns its entry, for ``refuse`` and ``withdraw``."""
        same = 0
        for one, other in zip(self._before, messages, strict=False):
            if one != other:
                break
            same += 1
        entry: dict[str, Any] = {"same": same, "messages": list(messages[same:])}
        if max_tokens is not None:
            entry["max_tokens"] = max_tokens
        if tools != self._tools:
            entry["tools"] = None if tools is None else list(tools)
        self.entries.append(entry)
        self._before, self._tools = messages, tools
        return entry


def refuse(entry: dict[str, Any]) -> None:
    """The model was not asked, since the episode had no room."""
    entry["refused"] = True


def withdraw(entry: dict[str, Any]) -> None:
    """There was no question: the messages cannot be rendered."""
    entry["withdrawn"] = True


def answers_in(entries: Sequence[Mapping[str, Any]]) -> int:
    """How many of the questions the model was asked."""
    return sum(not entry.get("refused") and not entry.get("withdrawn") for entry in entries)


def turns_of(entries: Sequence[Mapping[str, Any]]) -> Iterator[ChatTurn]:
    """The questions again."""
    messages: list[Message] = []
    tools: Sequence[Message] | None = None
    for entry in entries:
        messages = [*messages[: entry["same"]], *entry["messages"]]
        tools = entry.get("tools", tools)
        if not entry.get("withdrawn"):
            yield ChatTurn(messages, tools, entry.get("max_tokens"))
