"""Read a file by way of another process's root."""

from attempt import FACTS, attempted

with attempted() as through, open(f"/proc/{FACTS['victim']}/root{FACTS['public']}") as file:
    through(file.read())
