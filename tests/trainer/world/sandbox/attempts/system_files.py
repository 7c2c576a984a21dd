"""Read the machine's list of users."""

from attempt import attempted

with attempted() as through:
    with open("/etc/passwd") as file:
        through(file.readline())
