"""What the attempts share; it lies beside each of them."""

import contextlib
import ctypes
import errno
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

with open("facts.json") as _file:
    FACTS: dict[str, Any] = json.load(_file)
"""What there is to get at: ports, paths, a process of the job."""

NUMBERS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_getfd": (438, 438), "unshare": (272, 97),
    "clone": (56, 220), "clone3": (435, 435), "mount": (165, 40), "io_uring_setup": (425, 425), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "shmget": (29, 194),
    "shmctl": (31, 195), "mq_open": (240, 180), "mq_unlink": (241, 181), "init_module": (175, 105),
    "name_to_handle_at": (303, 264), "prctl": (157, 167), "seccomp": (317, 277), "capget": (125, 90),
}  # fmt: skip
"""Of system calls, on x86_64 and aarch64."""


class _ThroughError(Exception):
    """The attempt has got at something."""


@contextlib.contextmanager
def attempted() -> Iterator[Callable[[str], NoReturn]]:
    """Says how the attempt inside ended. ``KeyError`` and ``FileNotFoundError`` mean that there is nothing to get
    at."""

    def through(what: str) -> NoReturn:
        raise _ThroughError(what)

    try:
        yield through
    except _ThroughError as what:
        print("through:", what)
    except (KeyError, FileNotFoundError, ProcessLookupError) as error:
        print("nothing there:", type(error).__name__)
    except OSError as error:
        print("refused:", errno.errorcode.get(error.errno or 0, str(error)))
    except (ValueError, subprocess.SubprocessError) as error:
        print("refused:", error)


def system_call(name: str, *arguments: Any) -> int:
    """Raises ``OSError``."""
    number = NUMBERS[name][0 if platform.machine() == "x86_64" else 1]
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
