"""Handle page faults."""

from attempt import attempted, system_call

with attempted() as through:
    system_call("userfaultfd", 1)
    through("opened")
