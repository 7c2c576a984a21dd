"""Read the environment of a process of the job."""

from attempt import FACTS, attempted

with attempted() as through, open(f"/proc/{FACTS['victim']}/environ", "rb") as file:
    through(str(b"SECRET" in file.read()))
