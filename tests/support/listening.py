"""Where processes can be reached."""

from __future__ import annotations

from contextlib import suppress

import psutil


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a process and all below it listen; addresses as IPv4 where they are that."""
    first = psutil.Process(pid)
    found = set()
    for process in (first, *first.children(recursive=True)):
        # One that has ended meanwhile listens nowhere.
        with suppress(psutil.NoSuchProcess):
            sockets = process.net_connections("inet")
            found |= {socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return {(address.ip.removeprefix("::ffff:"), address.port) for address in found}
