"""Several processes that train one model: how they join, which one writes, and arrays whose parts lie elsewhere.

Every process runs the same script on the same config. With one process nothing here does anything.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from qwen3next.errors import InputError

_VARIABLES = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")


def join() -> None:
    """Joins the processes of the job: on Cloud TPUs, Slurm and Open MPI JAX finds them.

    Elsewhere the variables `COORDINATOR_ADDRESS` (host:port of the first one), `NUM_PROCESSES` and `PROCESS_ID` say
    them. Raises `InputError` if neither does.
    """
    address, count, number = (os.environ.get(name) for name in _VARIABLES)
    try:
        if address and count and number:
            jax.distributed.initialize(address, int(count), int(number))
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        told = str(error).strip().splitlines()[0]
        raise InputError(
            f"mesh.distributed: the processes cannot join ({told}); allowed: a Cloud TPU, Slurm or Open MPI job, or "
            f"{', '.join(_VARIABLES)} in the environment"
        ) from error


def leads() -> bool:
    """Whether this is the process that writes the run's folder and prints."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Waits for all processes to come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agreed(wanted: bool) -> bool:
    """Whether any process wants it; all must ask."""
    if jax.process_count() == 1:
        return wanted
    return bool(multihost_utils.process_allgather(np.asarray(wanted)).any())


def fetch(array: jax.Array) -> np.ndarray:
    """The whole array on this host; all processes must ask."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
