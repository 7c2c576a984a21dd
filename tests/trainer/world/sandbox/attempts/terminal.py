"""Type into a terminal."""

import fcntl
import termios

from attempt import attempted

with attempted() as through:
    for descriptor in range(3):
        fcntl.ioctl(descriptor, termios.TIOCSTI, b"x")
    through("typed")
