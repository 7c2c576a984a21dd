"""Settings of NCCL that all members of a communicator need alike.

NCCL asks the variables of each process for itself and never compares them: members that were told different things
choose different transports, protocols or numbers of channels, and wait for each other without end at the first byte.
Those are named here (NVIDIA's "Environment Variables" in the NCCL user guide says what each does). What may differ
from host to host is not: interfaces, adapters, levels of distance, and what is printed.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIKE = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_NET_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
)


def settings_alike(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that the others need alike. Empty ones are as if they were not there, and so is
    a ``*_DISABLE`` of 0, which switches nothing off."""
    set_there = {name: variables[name] for name in ALIKE if variables.get(name)}
    return {name: value for name, value in set_there.items() if not (name.endswith("_DISABLE") and value == "0")}
