"""The endpoint itself, and the record of what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rljob_trainer.endpoint.server import Endpoint, serving_endpoint
from rljob_trainer.episodes.log import EpisodeLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EpisodeLog]:
    opened = EpisodeLog(tmp_path / "episodes")
    yield opened
    opened.close()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving_endpoint() as served:
        yield served
