"""kopf is told to write nothing, to watch only what is ours, and never to give up."""

from __future__ import annotations

import itertools

from rljob_operator import watching
from rljob_operator.inventory import LABELLED


def test_kopf_writes_nothing_and_watches_what_is_ours() -> None:
    settings = watching.settings()
    assert settings.posting.enabled is False
    selectors = settings.watching.label_selectors
    assert len(selectors) == len(LABELLED) == 2
    assert set(selectors.values()) == {"rljob.dev/job"}


def test_reads_are_tried_for_ever_and_from_the_beginning_each_time() -> None:
    backoffs = watching.settings().networking.error_backoffs
    assert not isinstance(backoffs, int | float)
    for _ in range(2):
        pauses = list(itertools.islice(backoffs, 1000))
        assert pauses[0] == 0.5
        assert pauses[-1] == 4
