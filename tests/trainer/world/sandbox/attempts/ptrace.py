"""Trace a process of the job."""

from attempt import FACTS, attempted, system_call

with attempted() as through:
    system_call("ptrace", 0x4206, FACTS["victim"], 0, 0)
    through("seized")
