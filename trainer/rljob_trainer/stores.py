"""Where members of a torch.distributed group meet: a store that is reached at one address and no other."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its types leave stores out
TIMEOUT = timedelta(seconds=300)
"""torch's own default for what is asked of a store."""


def reach_store(address: str, timeout: timedelta = TIMEOUT) -> Any:
    """The store that another process serves at ``host:port``, or will serve.

    Raises ``torch.distributed.DistError`` when nobody does within ``timeout``.
    """
    host, port = address.rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def serve_store(host: str, port: int = 0, timeout: timedelta = TIMEOUT) -> tuple[Any, str]:
    """A store that listens on ``host`` alone, and its ``host:port``. ``port``: 0 for any that is free.

    torch's own rendezvous (``init_method="tcp://..."``) listens on every address of the machine.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store, f"{host}:{port}"
