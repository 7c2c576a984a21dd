"""What all players of a cluster's parts do: look again and again, and bear an API server that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kube.control_plane import ApiCallError


async def play(look: Callable[[], None], pause: float) -> None:
    """Looks until cancelled, `pause` seconds apart."""
    while True:
        # The API server may be away for a while: tests restart it.
        try:
            await asyncio.to_thread(look)
        except OSError:
            pass
        except ApiCallError as error:
            if error.code < 500:
                raise
        await asyncio.sleep(pause)
