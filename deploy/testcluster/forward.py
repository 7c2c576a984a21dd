"""`python -m testcluster.forward DESCRIPTOR HOST PORT`: passes connections on, from one network namespace to another.

The listening socket was made in the host's namespace and handed down; the connections are made in the one this
process lives in. So the host reaches the API server over its loopback, with no link or route between the two.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await source.read(65536):
            target.write(part)
            await target.drain()
    with suppress(OSError):
        target.close()


async def forward(listening: socket.socket, host: str, port: int) -> None:
    """Serves until cancelled."""

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, back), _copy(onward, writer))

    server = await asyncio.start_server(passed, sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
