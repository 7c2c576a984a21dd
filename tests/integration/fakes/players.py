"""What all players of a cluster's parts do: look when something has changed, and bear an API server that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from kube.control_plane import ApiCallError
from kube.mirror import Mirror

PAUSE_SECONDS = 0.05
"""Between two looks at least: many changes cost one look."""


async def play(look: Callable[[], bool], *mirrors: Mirror) -> None:
    """Looks until cancelled, after each change of a mirror, and soon again while a look says that something is left."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    with ExitStack() as listening:
        for mirror in mirrors:
            listening.enter_context(mirror.listening(lambda: loop.call_soon_threadsafe(changed.set)))
        while True:
            changed.clear()
            # The API server may be away for a while: tests restart it.
            try:
                left = await asyncio.to_thread(look)
            except OSError:
                left = True
            except ApiCallError as error:
                if error.code < 500:
                    raise
                left = True
            await asyncio.sleep(PAUSE_SECONDS)
            if not left:
                await changed.wait()
