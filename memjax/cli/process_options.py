"""Options that join several processes into one command.

What: `ProcessOptions`, the options, and `joined`, which carries them out.
Why: `train`, `eval` and `doctor` join in the same words, and only when told so.
When not: one process with many devices needs none of this.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from memjax.errors import ConfigError
from memjax.parallel.clusters import Wanted, wanted


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The first four also as environment variables: MEMJAX_COORDINATOR and so on."""

    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Several processes: where process 0 listens. The same in all of them."""
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Several processes: how many."""
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    """Several processes: which one this is, 0..N-1. Process 0 prints and writes."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """auto (default): join what SLURM, TPU or Kubernetes variables announce; none:
    stay alone; slurm, tpu, kubernetes: join that."""
    start_timeout: int = 300
    """Seconds to wait for all processes at the start."""
    heartbeat_timeout: int = 100
    """Seconds of silence after which a process counts as dead."""


def wanted_processes(options: ProcessOptions) -> Wanted | None:
    """Whom these options and the environment join; None: nobody.

    Raises ConfigError as `memjax.parallel.clusters.wanted`, and for a bad time limit.
    """
    for name in ("start_timeout", "heartbeat_timeout"):
        if getattr(options, name) < 1:
            raise ConfigError(
                name.replace("_", "-"), getattr(options, name), "at least 1 second"
            )
    return wanted(
        os.environ,
        coordinator=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process_id,
        cluster=options.cluster,
    )


@contextlib.contextmanager
def joined(options: ProcessOptions) -> Iterator[bool]:
    """Inside, the processes are joined; yields whether this one prints and writes.

    Processes other than 0 show no warnings. Nothing happens, and no jax is imported,
    when nobody is to be joined.

    Raises:
        ConfigError, TrainingError: as `connect` and `check_devices`.
    """
    found = wanted_processes(options)
    if found is None:
        yield True
        return
    from memjax.parallel.process_devices import check_devices
    from memjax.parallel.processes import connect

    with connect(
        found,
        start_timeout_s=options.start_timeout,
        heartbeat_timeout_s=options.heartbeat_timeout,
    ):
        check_devices(found.num_processes)
        import jax

        if jax.process_index() != 0:
            warnings.simplefilter("ignore")
        yield jax.process_index() == 0
