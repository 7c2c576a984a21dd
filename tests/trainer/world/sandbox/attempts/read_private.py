"""Read a file of the job that only it may read."""

from attempt import FACTS, attempted

with attempted() as through, open(FACTS["private"]) as file:
    through(file.read())
