"""A run that stops at a boundary and goes on elsewhere with its open groups: each ends once, within its age."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from small_episodes import an_episode
from test_pipeline import Feed, World, run_virtual

from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings


class Keeping(World):
    """Remembers the version that a group began under, and goes on with it."""

    def __init__(self, rng: random.Random, max_age: int, spread: float) -> None:
        super().__init__(rng, max_age, spread)
        self.began: dict[int, int] = {}

    async def run(self, prompt: Prompt) -> Group:
        version = self.began.setdefault(prompt.ordinal, self.serving_version)
        await super().run(prompt)
        return Group(prompt, [an_episode(prompt, 0, [version])])

    def later(self, versions: int) -> None:
        """The weights are published again under a later number, by which kept tokens are moved as well."""
        self.serving_version += versions
        self.began = {ordinal: version + versions for ordinal, version in self.began.items()}


class Notes:
    """A journal that counts."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}

    def admitted(self, prompt: Prompt, version: int, deadline: int) -> None:
        self.states[prompt.ordinal] = "running"

    def finished(self, ordinal: int) -> None:
        assert self.states[ordinal] == "running"
        self.states[ordinal] = "finished"

    def dropped(self, group: Group, reason: str) -> None:
        self.states[group.prompt.ordinal] = f"dropped: {reason}"

    def trained(self, groups: Sequence[Group], step: int, version: int) -> None:
        for group in groups:
            assert self.states[group.prompt.ordinal] == "finished"
            self.states[group.prompt.ordinal] = "trained"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_age=st.integers(0, 6),
    pull=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    spread=st.sampled_from([0.1, 1.0, 2.5]),
    skipped=st.integers(0, 3),
    prompts=st.integers(1, 80),
    ordered=st.booleans(),
)
def test_every_prompt_ends_once_whenever_the_process_ended(
    seed: int,
    max_age: int,
    pull: int,
    sizes: list[int],
    spread: float,
    skipped: int,
    prompts: int,
    ordered: bool,
) -> None:
    """``sizes``: pulls a version in each of the processes; ``skipped``: version numbers lost between two of them."""

    async def main() -> None:
        rng = random.Random(seed)
        world, feed, notes = Keeping(rng, max_age, spread), Feed(prompts), Notes()
        opened: list[tuple[Prompt, int]] = []
        version, before = 0, sizes[0]
        for number, size in enumerate(sizes):
            schedule = Schedule(ScheduleSettings(pull * before, pull, max_age, None, ordered), version)
            for prompt, deadline in opened:
                schedule.restored(prompt.ordinal, deadline)
            schedule.change(ScheduleSettings(pull * size, pull, max_age, None, ordered))
            steps = rng.randint(1, 6) if number < len(sizes) - 1 else 10_000

            async def after_step(record: StepRecord, last: int = steps) -> bool:
                return record.step < last

            restored = [prompt for prompt, _ in opened]
            pipeline = Pipeline(
                feed,
                world,
                world,
                schedule,
                after_step=after_step,
                journal=notes,
                restored=restored,
                sample_deadline_seconds=1e12,
            )
            await pipeline.run()
            world.running = 0
            opened = [(prompt, schedule.deadline(prompt.ordinal) + skipped) for prompt in pipeline.open_prompts]
            version, before = schedule.version + skipped, schedule.settings.groups_per_version // pull
            world.later(skipped)
        assert sorted(world.trained) == list(range(prompts))
        assert notes.states == dict.fromkeys(range(prompts), "trained")

    run_virtual(main())
