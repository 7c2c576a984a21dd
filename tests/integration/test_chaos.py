"""Chance on a real API server: whatever happens to jobs, pods, operator and network, each job gets where it shall.

RLJOB_CHAOS_RUNS says how many jobs walk (twenty at a time), RLJOB_CHAOS_SEED where their seeds begin.
"""

from __future__ import annotations

import os

import pytest
from chaos import walk_all
from conformance import conforms
from fakes.bad_network import BadNetwork
from world import World

pytestmark = pytest.mark.timeout(3600)

RUNS = int(os.environ.get("RLJOB_CHAOS_RUNS", "20"))
FIRST = int(os.environ.get("RLJOB_CHAOS_SEED", "1"))


async def test_every_job_gets_where_it_shall(world: World, network: BadNetwork) -> None:
    await walk_all(world, network, FIRST, RUNS)


async def test_the_fake_does_what_kuberay_does(world: World) -> None:
    await conforms(world)
