"""Requests to the first process of a node or of the hub: one line in, one line out, over a socket in the folder.

The kernel tells a caller which process listens, in the caller's own numbering. So a socket is also the way to find a
process that sits in namespaces of its own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path

ANSWER_SECONDS = 30.0


class RefusedError(RuntimeError):
    """The process answered that it can't do what it was asked."""


def ask(path: Path, request: str) -> str:
    """Sends one request and returns the answer.

    Raises:
        OSError: nobody listens, or doesn't answer.
        RefusedError: the answer is a refusal.
    """
    with _connected(path) as connection:
        connection.sendall(request.encode() + b"\n")
        kind, _, text = _line(connection).partition(" ")
    if kind != "ok":
        raise RefusedError(text or "the process ended")
    return text


def listener_of(path: Path) -> int | None:
    """Process id of the listener, as the caller's namespace counts; None where nobody listens."""
    try:
        with _connected(path) as connection:
            size = struct.calcsize("3i")
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            return int(pid)
    except OSError:
        return None


def listen(path: Path) -> socket.socket:
    """The listening socket at a path; what a process before us left there is removed."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(16)
    return listening


def answer(listening: socket.socket, serve: Callable[[list[str]], str]) -> None:
    """Takes one connection and answers its request with what `serve` makes of its words."""
    connection, _ = listening.accept()
    with connection:
        connection.settimeout(1.0)
        try:
            words = _line(connection).split()
            if not words:
                return  # somebody only wanted to know who listens
            try:
                reply = f"ok {serve(words)}"
            except (KeyError, ValueError) as problem:
                reply = f"no {problem.args[0]}"
            connection.sendall(reply.encode() + b"\n")
        except OSError:
            return  # the caller is gone; there is nobody to tell


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(4096)
        if not part:
            break
        received += part
    return received.decode().strip()
