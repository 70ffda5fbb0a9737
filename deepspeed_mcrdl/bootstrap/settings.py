"""Environment variables that an MPI library runs well with here, by vendor; docs/BACKENDS.md has the measurements."""

from __future__ import annotations

import os


def settings(library: str, one_host: bool, crowded: bool) -> dict[str, str]:
    """Return the variables to start MPI with that the user has not set.

    Args:
        library: vendor and version of the MPI library.
        one_host: whether all ranks are on one host.
        crowded: whether this host has more ranks than cores.
    """
    wanted: dict[str, str] = {}
    if one_host:
        # Else the networks below MPI listen on every interface, for ranks on other hosts that there are not.
        wanted |= {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    if crowded and library.startswith("Intel MPI"):
        # For MPI's own blocking calls, in which a rank else keeps its core from the one it waits for.
        wanted |= {"I_MPI_THREAD_YIELD": "2", "I_MPI_WAIT_MODE": "1"}
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    # Read by MPICH: its Finalize then doesn't wait for the others, which bootstrap.mpi has done before.
    return wanted | {"MPIR_CVAR_NO_COLLECTIVE_FINALIZE": "1"}
