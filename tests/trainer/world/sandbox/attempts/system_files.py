"""Read the machine's list of users."""

from attempt import attempted

with attempted() as through, open("/etc/passwd") as file:
    through(file.readline())
