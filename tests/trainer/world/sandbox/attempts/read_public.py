"""Read a token that everybody on the machine may read."""

from attempt import FACTS, attempted

with attempted() as through, open(FACTS["public"]) as file:
    through(file.read())
