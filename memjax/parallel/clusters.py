"""Which processes belong together, from options and environment variables.

What: `wanted` -> how to join the other processes, or None for a plain single process.
Why: a machine is joined to others only when told so or when a cluster says so, and the
    whole decision is one function of words, which is tested without a cluster.
When not: joining; `memjax.parallel.processes` does. Addresses on a cluster are found
    by jax's own detection.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping

from memjax.errors import ConfigError

CLUSTERS = ("auto", "none", "slurm", "tpu", "kubernetes")
_VARIABLES = {
    "coordinator": "MEMJAX_COORDINATOR",
    "num_processes": "MEMJAX_NUM_PROCESSES",
    "process_id": "MEMJAX_PROCESS_ID",
}
_SLURM = (
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    *("SLURM_PROCID", "SLURM_LOCALID"),
)
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """How to join.

    Attributes:
        found_by: "options" or the name of a cluster.
        coordinator: HOST:PORT of process 0; None leaves it to jax's detection.
        num_processes, process_id: None leaves both to jax's detection.
        local_device_ids: GPUs of this process among those that it sees; () is all.
    """

    found_by: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] = ()


def wanted(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    cluster: str | None = None,
) -> Wanted | None:
    """How this process joins others; None when it is alone.

    What is given by name wins over MEMJAX_COORDINATOR, MEMJAX_NUM_PROCESSES,
    MEMJAX_PROCESS_ID and MEMJAX_CLUSTER; those win over what a cluster set. Recognised
    are a SLURM job step of several tasks (`srun`), TPU hosts that list each other, and
    a pod of an indexed Kubernetes job where the package `kubernetes` is installed.

    Args:
        environ: environment variables.
        coordinator: HOST:PORT at which process 0 listens; all three or none.
        num_processes: how many; 1 is a plain single process.
        process_id: 0..num_processes-1.
        cluster: "auto" (default), "none" (never join) or the only one that is meant.

    Raises:
        ConfigError: half of an address, a port, number or cluster that cannot be, or a
            cluster that is asked for and not there.
    """
    given = {
        name: environ.get(variable) if value is None else value
        for (name, variable), value in zip(
            _VARIABLES.items(), (coordinator, num_processes, process_id), strict=True
        )
    }
    kind = cluster or environ.get("MEMJAX_CLUSTER") or "auto"
    if kind not in CLUSTERS:
        raise ConfigError("cluster", kind, f"one of {', '.join(CLUSTERS)}")
    present = {name: value for name, value in given.items() if value not in (None, "")}
    by_name = (coordinator, num_processes, process_id)
    if cluster == "none" and all(value is None for value in by_name):
        return None
    if present:
        if kind != "auto":
            raise ConfigError("cluster", kind, "auto beside a coordinator")
        return _explicit(present)
    found = {"slurm": _slurm, "tpu": _tpu, "kubernetes": _kubernetes}
    if kind == "auto":
        joined = (look(environ, False) for look in found.values())
        return next((one for one in joined if one is not None), None)
    return None if kind == "none" else found[kind](environ, True)


def _explicit(given: Mapping[str, str | int]) -> Wanted | None:
    missing = [_option(name) for name in _VARIABLES if name not in given]
    if missing:
        there = next(iter(given))
        raise ConfigError(
            _option(there), given[there], f"given together with {', '.join(missing)}"
        )
    address = str(given["coordinator"])
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError("coordinator", address, "HOST:PORT, port 1..65535")
    count = _number("num_processes", given["num_processes"])
    if count < 1:
        raise ConfigError("num-processes", count, "at least 1")
    mine = _number("process_id", given["process_id"])
    if not 0 <= mine < count:
        raise ConfigError(
            "process-id", mine, f"0..{count - 1}, as --num-processes is {count}"
        )
    if count == 1:
        return None
    return Wanted(
        found_by="options", coordinator=address, num_processes=count, process_id=mine
    )


def _slurm(environ: Mapping[str, str], asked: bool) -> Wanted | None:
    missing = [name for name in _SLURM if name not in environ]
    if missing:
        if asked:
            raise ConfigError(
                "cluster", "slurm", f"inside `srun`; {', '.join(missing)} is not set"
            )
        return None
    name = "SLURM_STEP_NUM_TASKS"
    count = _number(name, environ.get(name, environ["SLURM_NTASKS"]))
    if count == 1:
        return None
    return Wanted(
        found_by="slurm",
        num_processes=count,
        process_id=_number("SLURM_PROCID", environ["SLURM_PROCID"]),
        local_device_ids=_slurm_devices(environ),
    )


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...]:
    """GPUs of a task among those it sees; () is all of them.

    jax gives a task the one GPU of its number on the node. Here a task that is alone on
    its node, or whose GPUs SLURM has bound to it, takes all that it sees; tasks that
    see the same GPUs take equal shares.
    """
    mine = _number("SLURM_LOCALID", environ["SLURM_LOCALID"])
    tasks = _tasks_on_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE", ""),
        _number("SLURM_NODEID", environ.get("SLURM_NODEID", 0)),
    )
    bound = "SLURM_GPUS_PER_TASK" in environ
    bound |= environ.get("SLURM_GPU_BIND", "none") != "none"
    if tasks == 1 or bound:
        return ()
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    count = len(visible.split(",")) if visible else 0
    if count == 1:
        return ()
    share = max(1, count // tasks) if tasks else 1
    return tuple(range(mine * share, (mine + 1) * share))


def _tasks_on_node(text: str, node: int) -> int:
    """Tasks of a node in SLURM's short form, "2(x3),1"; 0 where it is not said."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        tasks, _, times = part.partition("(x")
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts[node] if node < len(counts) else 0


def _tpu(environ: Mapping[str, str], asked: bool) -> Wanted | None:
    hosts = next((environ[name] for name in _TPU_HOSTS if environ.get(name)), "")
    slices = _number("MEGASCALE_NUM_SLICES", environ.get("MEGASCALE_NUM_SLICES") or 1)
    if asked or len(hosts.split(",")) > 1 or slices > 1:
        return Wanted(found_by="tpu")
    return None


def _kubernetes(environ: Mapping[str, str], asked: bool) -> Wanted | None:
    names = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
    missing = [f"{name} is not set" for name in names if name not in environ]
    if importlib.util.find_spec("kubernetes") is None:
        missing.append("pip install kubernetes")
    if not missing:
        return Wanted(found_by="kubernetes")
    if asked:
        raise ConfigError(
            "cluster", "kubernetes", f"a pod of an indexed job; {', '.join(missing)}"
        )
    return None


def _number(name: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(_option(name), text, "an integer") from None


def _option(name: str) -> str:
    return name if name.isupper() else name.replace("_", "-")
