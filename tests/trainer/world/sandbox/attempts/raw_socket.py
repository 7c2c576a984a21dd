"""Open a raw socket, or one to the kernel."""

import socket

from attempt import attempted

with attempted() as through:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    through("a netlink socket")
