"""Whether the devices that joined processes see make one machine.

What: `check_devices`, and `device_fault`, its rule on plain data.
Why: two processes on the same GPUs, or of unequal parts, fail later and without a word
    of what to change.
When not: a mesh that does not fit the devices; `memjax.parallel.mesh` says so.
"""

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import jax

from memjax.errors import ConfigError
from memjax.parallel.processes import exchange, is_joined


def check_devices(n_processes: int | None = None) -> None:
    """Devices here x processes = all devices, the same here as there.

    Args:
        n_processes: as told; None when a cluster was asked.

    Raises:
        ConfigError: with the fix. All processes raise the same.
    """
    if not is_joined():
        if jax.process_count() > 1:
            raise ConfigError(
                "processes",
                jax.process_count(),
                "connected ones; --cluster tpu on every host of a TPU pod",
            )
        return
    here = {
        "host": socket.gethostname(),
        "platform": jax.local_devices()[0].platform,
        "ids": [device.local_hardware_id for device in jax.local_devices()],
        "visible": [
            os.environ.get(name)
            for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
        ],
    }
    seen = [json.loads(text) for text in exchange("devices", json.dumps(here))]
    device_fault(seen, jax.device_count(), jax.process_count(), n_processes)


def device_fault(
    seen: list[dict[str, Any]], n_devices: int, n_found: int, n_told: int | None
) -> None:
    """ConfigError when what the processes see cannot be one machine of equal parts.

    Args:
        seen: of every process `host`, `platform`, `ids` of its devices and `visible`,
            the variables that restrict which GPUs it sees.
        n_devices: all devices, as jax counts them.
        n_found: processes that have devices, as jax counts them.
        n_told: processes as told.
    """
    n_processes = len(seen) if n_told is None else n_told
    if n_found != n_processes:
        raise ConfigError(
            "num-processes",
            n_processes,
            f"{n_found}, the processes among which the {n_devices} devices are "
            "divided; one process a host of a TPU",
        )
    counts = [len(one["ids"]) for one in seen]
    if len(set(counts)) > 1 or counts[0] * n_processes != n_devices:
        listed = ", ".join(f"process {i}: {count}" for i, count in enumerate(counts))
        raise ConfigError(
            "devices",
            n_devices,
            f"devices of a process ({listed}) x {n_processes} processes; give each as "
            "many, by CUDA_VISIBLE_DEVICES on GPUs, by "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N on CPUs",
        )
    for i, one in enumerate(seen):
        for j, other in enumerate(seen[:i]):
            if _share_a_gpu(one, other):
                raise ConfigError(
                    "devices",
                    f"GPUs {one['ids']} of {one['host']}",
                    f"of one process; processes {j} and {i} both see them. Give each "
                    "its own by CUDA_VISIBLE_DEVICES (launch/local.sh --gpus), or "
                    "start one process on that machine",
                )


def _share_a_gpu(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both certainly see the same GPU.

    With CUDA_VISIBLE_DEVICES set nothing is certain: behind a cgroup both may say 0.
    """
    same = all(one[name] == other[name] for name in ("host", "platform", "visible"))
    gpu = one["platform"] not in ("cpu", "tpu") and one["visible"][0] is None
    return same and gpu and bool(set(one["ids"]) & set(other["ids"]))
