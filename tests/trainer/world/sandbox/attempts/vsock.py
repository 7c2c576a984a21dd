"""Reach the host of the virtual machine."""

import socket

from attempt import attempted

with attempted() as through:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    through("a vsock socket")
