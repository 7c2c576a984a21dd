"""Which engine has the keys and values of an episode, and what engines had to compute again.

An episode of many turns asks with all that was said so far, and an interrupted request goes on with what it has. The
engine that answered last has the keys and values of that (its *home*); any other computes them anew. So a request goes
home, unless others have so much less to do that waiting there would cost more than computing again. Keys and values are
a cache: nothing but speed depends on where a request goes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult

_MOST = 1 << 17
"""Episodes that are remembered; the oldest are forgotten."""

_Key = tuple[object, ...]


@dataclass(slots=True)
class _Home:
    engine: str
    computed: int
    """Tokens of the episode whose keys and values were computed, there or elsewhere."""
    version: int | None = None
    """Of the weights that did; None: nothing was computed yet."""


class Homes:
    """Remembers for each episode the engine that it was sent to last."""

    def __init__(self, *, recomputes: bool = False) -> None:
        """``recomputes``: an update makes engines compute the keys and values of what is running anew."""
        self._recomputes = recomputes
        self._homes: OrderedDict[_Key, _Home] = OrderedDict()
        self._generated = self._again = self._forced = 0

    def of(self, request: GenerationRequest) -> str | None:
        """The name of the engine that has what the request begins with; None: no engine has."""
        if _begins(request):
            return None  # the name may be known from a validation of other weights
        home = self._homes.get(_key(request.id))
        return None if home is None else home.engine

    def sent(self, request: GenerationRequest, engine: str) -> None:
        """The request goes to this engine."""
        key = _key(request.id)
        home = self._homes.pop(key, None)
        if home is None or _begins(request):
            home = _Home(engine, 0)
        home.engine = engine
        self._homes[key] = home  # the last one now
        while len(self._homes) > _MOST:
            self._homes.popitem(last=False)

    def answered(self, request: GenerationRequest, result: GenerationResult) -> None:
        """The engine that had the request has ended it, with ``result``."""
        made, begun = len(result.tokens), len(request.begun)
        self._generated += max(made - begun, 0)
        home = self._homes.get(_key(request.id))
        if home is None or made <= begun:
            return
        prompt, versions = len(request.prompt_ids), result.tokens.versions
        first = versions.item(begun)
        again = result.prefilled and max(result.prefilled - max(prompt + begun - home.computed, 0), 0)
        # What was cached is forgotten with the weights that it was computed by.
        forced = again if home.version not in (None, first) else 0
        if self._recomputes:
            versions = versions[begun:]
            # Where the version changes all that stands before was computed once more.
            changes = (versions[1:] != versions[:-1]).nonzero()[0] + begun + 1
            while_it_ran = int(changes.sum()) + prompt * len(changes)
            again, forced = again + while_it_ran, forced + while_it_ran
        self._forced += forced
        self._again += again
        # Nothing was computed from its last token.
        home.computed, home.version = prompt + made - 1, versions.item(-1)

    def take_counts(self) -> dict[str, float]:
        """Metrics since the last call; empty when nothing was generated."""
        generated, again, forced = self._generated, self._again, self._forced
        self._generated = self._again = self._forced = 0
        if not generated:
            return {}
        return {"rollout/recomputed_ratio": again / generated, "rollout/recomputed_ratio/forced": forced / generated}


def goes_home(home: int, least: int, own: int) -> bool:
    """Whether a request is worth its home's queue. ``home`` and ``least`` are the tokens that its home, and the engine
    with the fewest, may still have to make; ``own`` those of the request."""
    return home - least <= max(own, least // 2)


def _begins(request: GenerationRequest) -> bool:
    """Whether it is the first one of its episode."""
    return request.id.turn == 0 and not len(request.begun)


def _key(id: EpisodeId) -> _Key:
    return id[:-1]
