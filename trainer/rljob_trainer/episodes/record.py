"""What is known of the calls that an episode's program has made, and what it may not do when it is run again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rljob_trainer.episodes.episode import FinishReason
from rljob_trainer.episodes.identity import branch_turn
from rljob_trainer.episodes.receipts import Receipt, with_digest
from rljob_trainer.episodes.requests import BegunTurn
from rljob_trainer.episodes.tokens import Tokens

ASK = "ask"
"""The kind of the model's turns."""


class DivergedError(Exception):
    """A program does not do what it did when its calls were recorded; says where and what."""


class CallPlace(NamedTuple):
    """Where in a program a call is made: the path of its branch and its number there."""

    branch: tuple[str, ...]
    number: int

    @property
    def turn(self) -> int:
        """The number of the model's turn that is asked for here, whichever branch is faster: in a branch of its own it
        begins with 32 bits of the branch's name."""
        return self.number if self.branch == (ASK,) else branch_turn("/".join(self.branch), self.number)

    def __str__(self) -> str:
        return f"call {self.number} of {'/'.join(('the program', *self.branch))}"


class What(NamedTuple):
    """What is called there."""

    kind: str
    arguments: int
    """A digest."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """The model's answer to one question."""

    tokens: Tokens
    finish: FinishReason
    seconds: float
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One line of a record. One without ``turn`` that is not ``done`` is an intent: it was made, or about to be."""

    place: CallPlace
    what: What
    done: bool = False
    result: Any = None
    """Of a call of the world: JSON."""
    seconds: float = 0.0
    """From such a call to its result."""
    turn: RecordedTurn | None = None


@dataclass(slots=True)
class EpisodeRecord:
    """The calls of one episode, each at its place."""

    program: str
    """Of which program: its name and a digest of its text."""
    calls: dict[CallPlace, RecordedCall] = field(default_factory=dict)

    def put(self, call: RecordedCall) -> None:
        """The result takes its intent's place."""
        self.calls[call.place] = call

    @property
    def turns(self) -> int:
        """How many the model has answered."""
        return sum(call.turn is not None for call in self.calls.values())

    def at(self, place: CallPlace, what: What) -> RecordedCall | None:
        """What is recorded there; None: the program is live. Raises ``DivergedError`` if another call was made."""
        call = self.calls.get(place)
        if call is not None and call.what != what:
            same = call.what.kind == what.kind
            how = f"{what.kind} with other arguments" if same else f"{what.kind} in place of {call.what.kind}"
            raise DivergedError(f"{place} is {how}")
        return call

    def check_over(self, made: set[CallPlace]) -> None:
        """The program has ended. Raises ``DivergedError`` if calls are on record that it has not ``made``."""
        for place in self.calls.keys() - made:
            raise DivergedError(f"the program ended without {place}, {self.calls[place].what.kind}")

    def cut(self, version: int) -> tuple[int, BegunTurn] | None:
        """Forgets what weights made that did not survive: those of ``version`` and later ones.

        The first turn with such a token goes, and every call that was recorded after it. Returns the number of that
        turn and what is left of it, from which the model may go on; None when nothing had to go.
        """
        kept: dict[CallPlace, RecordedCall] = {}
        for place, call in self.calls.items():
            if call.turn is not None and (call.turn.tokens.versions >= version).any():
                self.calls = kept
                return place.turn, BegunTurn(call.what.arguments, call.turn.tokens.before(version))
            kept[place] = call
        return None

    def later(self, versions: int) -> None:
        """The surviving weights are published again under a number that is so much higher."""
        for place, call in self.calls.items():
            if (turn := call.turn) is not None:
                moved = turn.tokens.later(versions)
                # The engine's receipt is of the number that it knew.
                self.calls[place] = replace(call, turn=replace(turn, tokens=moved, receipt=renumbered(turn, moved)))


def renumbered(turn: RecordedTurn, moved: Tokens) -> Receipt | None:
    """The turn's receipt, for versions that were moved by whoever read them back; the rest is the engine's word."""
    if turn.receipt is None:
        return None
    return turn.receipt._replace(streams=with_digest(turn.receipt.streams, "versions", moved.versions))


def of_arguments(arguments: Sequence[Any]) -> int:
    """A digest of a call's arguments. Raises ``TypeError`` for what is no JSON."""
    return zlib.crc32(json.dumps(arguments, sort_keys=True).encode())
