"""When a prompt may start, which finished groups make the next batch, and when weights are published.

A schedule is a pure object: it knows neither Ray nor torch nor a clock. It is told what happened (``admitted``,
``finished``, ``trained``, ``dropped``, ``published``) and answers what may happen next. The three pipelines are three
settings of it:

    mode         groups per version G      maxAge    a pull
    sync         batch.groups              0         G
    oneStepOff   batch.groups              1         G
    fullyAsync   syncEvery x pull          any       requireBatches x miniBatchGroups

**The bound.** With v the trainer's version and c the groups trained in it, a group is *open* from admission until it
is trained or dropped, and its *deadline* is the version its engine serves at admission plus maxAge. At all times, for
every u >= v:

    #{open groups with deadline <= u}  <=  (G - c) + (u - v) G                                             (1)

The right side is the number of groups that will be trained up to the end of version u, so (1) says that every open
group can still be trained in time, whatever the engines' timing. It is tested before a prompt is admitted and before a
batch is chosen: if the groups that arrived first would break it, the batch takes as many of the earlier deadlines as
(1) asks for. Where not enough of those are finished the others are *late*: the batch waits for them, or whoever runs
the loop ends or drops them. Finished work is never dropped to keep the bound. A sample budget f, where set, holds as
well: open + c <= (1 + f) G.

**Live changes.** A new maxAge or budget counts for prompts admitted from now on. A new G takes effect at the first
publication from which (1) holds for the groups that are open now, with the new G on its right side for the versions
that follow; until then (1) is tested with both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from rljob_api.spec.pipeline import OnDeadline


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """What a mode comes down to. ``ordered``: batches are consecutive prompts, in the feed's order. ``on_deadline``:
    what becomes of groups that are late, which is the business of whoever runs the loop."""

    groups_per_version: int
    groups_per_pull: int
    max_age: int
    fraction: float | None = None
    ordered: bool = True
    on_deadline: OnDeadline = "wait"

    def __post_init__(self) -> None:
        if self.groups_per_pull < 1 or self.groups_per_version % self.groups_per_pull:
            raise ValueError(
                f"a version trains on {self.groups_per_version} groups, "
                f"which is not a multiple of the {self.groups_per_pull} groups of a pull"
            )


class Schedule:
    """The state of open groups and the answers that follow from it.

    Transitions: ``admitted`` -> ``finished`` -> ``choose`` -> ``trained``; ``dropped`` at any time before
    ``trained``; ``published`` when ``publication_due``.
    """

    def __init__(self, settings: ScheduleSettings, version: int = 0) -> None:
        self.settings = settings
        self.version = version
        self.trained_in_version = 0
        self._deadlines: dict[int, int] = {}  # ordinal -> deadline, all open groups in order of admission
        self._per_deadline: Counter[int] = Counter()  # deadline -> open groups
        self._finished: dict[int, None] = {}  # ordinals in order of arrival (a dict keeps order)
        self._training: set[int] = set()
        self._sizes: list[tuple[int, int]] = []
        """Groups per version that are to come: (version from which on, G), in order."""
        self._tell: Callable[[], None] | None = None

    def tells(self, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever ``change`` was: what was waited for may be there now."""
        self._tell = changed

    def change(self, wanted: ScheduleSettings) -> None:
        """Live settings: a new G from the publication on that allows it, all others at once. Raises ``ValueError`` if
        the present G is no multiple of another pull."""
        self.settings = replace(wanted, groups_per_version=self.settings.groups_per_version)
        planned, start, last = self._sizes, self.version + 1, max(self._per_deadline, default=0)
        while True:
            self._sizes = [*(step for step in planned if step[0] < start), (start, wanted.groups_per_version)]
            # (1) holds as things are planned, so at the latest it holds behind the last deadline.
            if start > last or self._holds(self._per_deadline, self.trained_in_version):
                break
            start += 1
        if self._tell is not None:
            self._tell()

    # --- what happened

    def admitted(self, ordinal: int, serving_version: int) -> None:
        """A prompt has been handed to an engine that serves ``serving_version``."""
        self.restored(ordinal, serving_version + self.settings.max_age)

    def restored(self, ordinal: int, deadline: int) -> None:
        """A group that was open in an earlier process is open again, with the deadline it had."""
        self._deadlines[ordinal] = deadline
        self._per_deadline[deadline] += 1

    def deadline(self, ordinal: int) -> int:
        """The last version that an open group may be trained in."""
        return self._deadlines[ordinal]

    def finished(self, ordinal: int) -> None:
        """All samples of the group are generated and scored."""
        self._finished[ordinal] = None

    def dropped(self, ordinal: int) -> None:
        """The group will not be trained (filtered, or lost)."""
        self._close(ordinal)
        self._finished.pop(ordinal, None)

    def trained(self, ordinals: Iterable[int]) -> None:
        """The groups of one pull have been trained on."""
        for ordinal in ordinals:
            self._close(ordinal)
            self._training.remove(ordinal)
            self.trained_in_version += 1

    def published(self) -> int:
        """The weights are on their way as a new version, whose number is returned."""
        self.version += 1
        self.trained_in_version = 0
        if self._sizes and self._sizes[0][0] <= self.version:
            self.settings = replace(self.settings, groups_per_version=self._sizes.pop(0)[1])
        return self.version

    # --- what may happen next

    @property
    def open(self) -> int:
        return len(self._deadlines)

    @property
    def waiting_finished(self) -> int:
        return len(self._finished)

    @property
    def running(self) -> int:
        """Groups that are open but neither finished nor in training."""
        return len(self._deadlines) - len(self._finished) - len(self._training)

    def admissible(self, serving_version: int) -> int:
        """How many more prompts, started now under ``serving_version``, keep the bound and the budget."""
        s, trained = self.settings, self.trained_in_version
        own = serving_version + s.max_age
        places: float = math.inf
        if s.fraction is not None:
            places = math.floor((1 + s.fraction) * s.groups_per_version) - trained - self.open
        total = 0
        for u in sorted({*self._per_deadline, own}):
            total += self._per_deadline[u]
            left = self._room(max(u, self.version)) - trained - total
            if u >= own:
                places = min(places, left)
            elif left < 0:
                return 0
        return max(0, int(places))

    def late(self, *, last: bool = False) -> list[int]:
        """The groups for which the next pull waits although as many as it takes are finished: with others in their
        place they could not be trained in time."""
        wanted = self._wanted(last)
        if self.settings.ordered or wanted == 0 or len(self._finished) < wanted:
            return []
        return [ordinal for ordinal in self._by_deadline(wanted) if ordinal not in self._finished]

    def choose(self, *, last: bool = False) -> list[int] | None:
        """The ordinals of the next pull, ascending, or None while it must wait. ``last``: the feed is exhausted, so a
        short batch is made of whatever is open.

        Ascending whatever came first: a batch in the order of arrival has its short responses in the first mini-batch
        and its long ones in the last, and each of these optimizer steps would go its own way.
        """
        wanted = self._wanted(last)
        if wanted == 0 or len(self._finished) < wanted:
            return None
        return self._take(self._next(wanted))

    def awaited(self, *, last: bool = False) -> tuple[int, int]:
        """How many groups of the next pull are finished, and how many it takes."""
        wanted = self._wanted(last)
        if not self.settings.ordered and len(self._finished) < wanted:
            return len(self._finished), wanted
        return sum(ordinal in self._finished for ordinal in self._next(wanted)), wanted

    @property
    def publication_due(self) -> bool:
        return self.trained_in_version >= self.settings.groups_per_version

    def _wanted(self, last: bool) -> int:
        wanted = min(self.settings.groups_per_pull, self.settings.groups_per_version - self.trained_in_version)
        return min(wanted, self.open - len(self._training)) if last else wanted

    def _next(self, wanted: int) -> Iterable[int]:
        """The groups of the next pull, finished or not."""
        if self.settings.ordered:
            return islice((o for o in self._deadlines if o not in self._training), wanted)
        return self._by_arrival(wanted)

    def _by_arrival(self, wanted: int) -> list[int]:
        chosen = list(islice(self._finished, wanted))
        counts = dict(self._per_deadline)
        for ordinal in chosen:
            counts[self._deadlines[ordinal]] -= 1
        if self._holds(counts, self.trained_in_version + wanted):
            return chosen
        # Arrival order would leave some group without a place before its deadline.
        needed = self._by_deadline(wanted)
        rest = (ordinal for ordinal in self._finished if ordinal not in needed)
        return [*needed, *islice(rest, wanted - len(needed))]

    def _by_deadline(self, wanted: int) -> dict[int, None]:
        """The groups without which a pull of ``wanted`` would break (1): for each version as few as there must be with
        a deadline up to it, finished ones first."""
        waiting: dict[int, list[int]] = {deadline: [] for deadline in self._per_deadline}
        for ordinal, deadline in self._deadlines.items():
            if ordinal not in self._training:
                waiting[deadline].append(ordinal)
        arrival = {ordinal: place for place, ordinal in enumerate(self._finished)}
        total, needed, possible = 0, dict[int, None](), list[int]()
        for u in sorted(waiting):
            total += self._per_deadline[u]
            possible += waiting[u]
            left = self._room(max(u, self.version)) - self.trained_in_version - wanted
            if (lack := total - left - len(needed)) > 0:
                possible.sort(key=lambda o: (o not in self._finished, arrival.get(o, 0), self._deadlines[o], o))
                needed.update(dict.fromkeys(possible[:lack]))
                del possible[:lack]
        return needed

    def _close(self, ordinal: int) -> None:
        deadline = self._deadlines.pop(ordinal)
        self._per_deadline[deadline] -= 1
        if not self._per_deadline[deadline]:
            del self._per_deadline[deadline]

    def _take(self, ordinals: Iterable[int]) -> list[int] | None:
        taken = []
        for ordinal in ordinals:
            if ordinal not in self._finished:
                return None
            taken.append(ordinal)
        for ordinal in taken:
            del self._finished[ordinal]
        self._training.update(taken)
        return sorted(taken)

    def _holds(self, deadlines: Mapping[int, int], trained: int) -> bool:
        """Inequality (1) for every u at which the left side changes."""
        total = 0
        for u in sorted(deadlines):
            total += deadlines[u]
            if total > self._room(max(u, self.version)) - trained:
                return False
        return True

    def _room(self, u: int) -> int:
        """Groups that are trained from the beginning of the present version to the end of version ``u``."""
        room, version, size = 0, self.version, self.settings.groups_per_version
        for start, later in self._sizes:
            if start > u:
                break
            room += (start - version) * size
            version, size = start, later
        return room + (u + 1 - version) * size
