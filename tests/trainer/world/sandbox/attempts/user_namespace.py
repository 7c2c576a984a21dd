"""Enter a user namespace by unshare."""

from attempt import attempted, system_call

with attempted() as through:
    system_call("unshare", 0x10000000)
    through("entered")
