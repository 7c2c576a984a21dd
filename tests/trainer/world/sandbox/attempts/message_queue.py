"""Leave a POSIX message queue."""

from attempt import FACTS, attempted, system_call

with attempted() as through:
    name = FACTS["name"].encode()
    system_call("mq_open", name, 0o100 | 2, 0o600, 0)
    system_call("mq_unlink", name)
    through("made")
