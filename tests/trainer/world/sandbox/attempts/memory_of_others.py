"""Read the memory of a process of the job by /proc."""

from attempt import FACTS, attempted

with attempted() as through, open(f"/proc/{FACTS['victim']}/mem", "rb"):
    through("opened")
