"""Several processes that run one program.

What: `connect`, `exchange`, `agree`, and how it ends: `Connection`, `failed`, `leave`.
Why: jax joins processes, but one that fails leaves the others in a collective that
    never ends. Here each watches for the word of a failed one, and ends too.
When not: a single process; everything here is then a no-op or not called.

Words travel through the key-value store of jax's coordination service, which lives in
process 0 and needs no device: they arrive while devices hang, and before any is used.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from memjax.errors import ConfigError, TrainingError
from memjax.parallel.clusters import Wanted

_ENDED = "memjax/ended"
_FOREVER_MS = 2**31 - 1
_EXCHANGE_MS = 10 * 60 * 1000
_LEAVE_S = 10.0
_WORD_S = 3.0


def connect(
    wanted: Wanted, *, start_timeout_s: int = 300, heartbeat_timeout_s: int = 100
) -> "Connection":
    """Join the other processes; before any device is touched.

    Args:
        wanted: who they are.
        start_timeout_s: how long to wait for all of them.
        heartbeat_timeout_s: silence after which a process counts as dead; jax then ends
            all others.

    Returns:
        A context manager around everything that they do together.

    Raises:
        ConfigError: the address is taken, or jax's detection does not find the cluster.
        TrainingError: a process of that number is there already.

    When some process does not come in time, this one says so and ends with code 1: jax
    would abort it with a stack trace, and gives no chance to raise.
    """
    if wanted.process_id == 0 and wanted.coordinator is not None:
        _check_port(wanted.coordinator)
    explicit = wanted.found_by == "options"
    handler = signal.getsignal(signal.SIGTERM)
    where = wanted.coordinator or wanted.found_by
    late = threading.Timer(start_timeout_s, _too_late, (where, start_timeout_s))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            wanted.coordinator,
            num_processes=wanted.num_processes,
            process_id=wanted.process_id,
            local_device_ids=None if explicit else list(wanted.local_device_ids),
            cluster_detection_method="deactivate" if explicit else None,
            initialization_timeout=start_timeout_s + 60,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
            shutdown_timeout_seconds=60,
        )
    except (ValueError, RuntimeError) as error:
        if explicit:
            raise TrainingError(
                f"the processes did not meet at {where} ({_first_line(error)})"
            ) from error
        raise ConfigError(
            "cluster",
            where,
            f"one that jax finds ({_first_line(error)}); or give --coordinator, "
            "--num-processes and --process-id",
        ) from error
    finally:
        late.cancel()
    # jax's notice of preemption has taken SIGTERM over; the loop answers it itself.
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
    return Connection()


def _too_late(where: str, seconds: int) -> None:
    print(
        f"memjax: not all processes met at {where} within {seconds} s; allowed: the "
        "same --coordinator and --num-processes in all of them, each --process-id "
        "once, all started within --start-timeout, the port open",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


class Connection:
    """What joined processes do together, as a context manager.

    A good end waits until all are there, then parts. At a bad one the others are told
    why; `leave` must follow, since an ordinary exit would wait for them. When another
    process ends badly, this one says so on standard error and ends with code 1 at once,
    whatever it is doing: its main thread may hang in a collective without end.
    """

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._told = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="memjax-other-processes", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, where: object
    ) -> None:
        if error is None:
            _client().wait_at_barrier("memjax/end", _EXCHANGE_MS)
            self._ending.set()
            if _me() == 0:
                _say(_ENDED, "")
            self._thread.join(timeout=_LEAVE_S)
            jax.distributed.shutdown()
            return
        gone = _is_lost_connection(error)
        # The devices may notice that a process has gone before its word is here.
        if self._told.wait(_WORD_S if gone else 0):
            self._thread.join()
        self._ending.set()
        said = " ".join(str(error).split())[:500] or type(error).__name__
        if isinstance(error, SystemExit | KeyboardInterrupt):
            said = "told to stop, and not training"
        _say(f"memjax/failed/{_me()}", said)
        _say(_ENDED, f"process {_me()} ended: {said}")
        if gone:
            raise TrainingError(
                f"another process has gone ({_first_line(error)}); the same command "
                "goes on from the newest checkpoint"
            ) from error

    def _watch(self) -> None:
        while True:
            try:
                text = _client().blocking_key_value_get(_ENDED, _FOREVER_MS)
                break
            except Exception as error:  # jax's own type for every cause
                if "DEADLINE_EXCEEDED" not in str(error):
                    return
        if not text or self._ending.is_set():
            return
        self._told.set()
        print(
            f"memjax: {text}; process {_me()} stops too; the same command goes on "
            "from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        leave(1)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether it is what devices raise when a process of a collective is missing."""
    said = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        word in said for word in ("gloo", "nccl", "connection", "unavailable")
    )


def failed() -> bool:
    """Whether this process has told the others that it ends badly."""
    if not is_joined():
        return False
    try:
        _client().key_value_try_get(f"memjax/failed/{_me()}")
    except jax.errors.JaxRuntimeError:
        return False
    return True


def leave(code: int) -> None:
    """End this process, which has failed, without waiting in jax's own shutdown.

    Process 0 holds the store: it stays until the others have read the word, ten
    seconds at most.
    """
    _say(f"memjax/left/{_me()}", "")
    if _me() == 0:
        limit = time.monotonic() + _LEAVE_S
        for process in range(1, _count()):
            left_ms = int(1000 * max(0.001, limit - time.monotonic()))
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _client().blocking_key_value_get(f"memjax/left/{process}", left_ms)
        time.sleep(1.0)  # they are on their way out; the end of the store aborts them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exchange(name: str, text: str) -> list[str]:
    """The texts of all processes, by number; a collective call without devices.

    Args:
        name: what it is about; the same calls in the same order in all processes.
        text: of this process.

    Raises:
        TrainingError: some process did not say anything in ten minutes.
    """
    if not is_joined():
        return [text]
    client = _client()
    count = client.key_value_increment(f"memjax/{name}/rounds/{_me()}", 1)
    key = f"memjax/{name}/{count}"
    client.key_value_set(f"{key}/{_me()}", text)
    texts = []
    for process in range(_count()):
        try:
            found = client.blocking_key_value_get(f"{key}/{process}", _EXCHANGE_MS)
        except jax.errors.JaxRuntimeError as error:
            raise TrainingError(
                f"process {process} does not answer about {name} ({_first_line(error)})"
            ) from error
        texts.append(found)
    return texts


def agree(name: str, value: Mapping[str, Any]) -> None:
    """Check that all processes have the same value; a collective call.

    Args:
        name: what it is, for the error.
        value: plain JSON data.

    Raises:
        ConfigError: names the first process that differs from process 0, and up to
            five fields. All processes raise the same.
    """
    texts = exchange(name, json.dumps(value, sort_keys=True))
    for process, text in enumerate(texts):
        if text == texts[0]:
            continue
        theirs, first = _flat(json.loads(text)), _flat(json.loads(texts[0]))
        fields = [
            f"{field}: {first.get(field)!r} in process 0, {theirs.get(field)!r} in "
            f"process {process}"
            for field in sorted(first.keys() | theirs.keys())
            if first.get(field) != theirs.get(field)
        ]
        raise ConfigError(
            name, "several", f"the same in all processes ({'; '.join(fields[:5])})"
        )


def _say(key: str, text: str) -> None:
    """Put a word into the store, unless another was first or the store is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(key, text)


def is_joined() -> bool:
    """Whether jax has joined this process to others."""
    return jax.distributed.is_initialized() and _count() > 1


def _client() -> Any:
    """The client of jax's store; jax has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


def _me() -> int:
    """As `jax.process_index()`, without starting the devices."""
    from jax._src import distributed

    return distributed.global_state.process_id


def _count() -> int:
    """As told; `jax.process_count()` starts the devices."""
    from jax._src import distributed

    return distributed.global_state.num_processes


def _check_port(address: str) -> None:
    port = int(address.rpartition(":")[2])
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                "coordinator", address, f"a free port ({error.strerror})"
            ) from error


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {} if items else {prefix: value}
    for name, inner in items:
        flat |= _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
