"""Compiled programs that the next start finds again.

What: `kept_programs`, a context in which jax keeps what it compiles in a folder.
Why: a resumed run, or the next of a sweep, should not wait for the compiler again.
When not: on a CPU by default: its programs use what that very CPU can do, and a folder
    may be read on another machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

AUTO, OFF = "auto", "off"
_FOLDER = "jax_compilation_cache_dir"
_LEAST_SECONDS = 0.1


def program_folder(setting: str, cache: Path, backend: str) -> Path | None:
    """Where programs are kept; None: nowhere.

    Args:
        setting: "auto": `compiled` in `cache`, but on a CPU nowhere; "off"; or a
            folder.
        cache: the folder of prepared corpora.
        backend: such as "cpu".
    """
    if setting == OFF or (setting == AUTO and backend == "cpu"):
        return None
    return (
        cache / "compiled" if setting == AUTO else Path(setting).expanduser().absolute()
    )


@contextmanager
def kept_programs(setting: str, cache: Path) -> Iterator[None]:
    """Keep programs whose compiling takes a tenth of a second or more.

    Arguments as in `program_folder`. A folder that jax was told of already, as by
    $JAX_COMPILATION_CACHE_DIR, stays the one. Settings of jax are as before afterwards.
    A program found in the folder is the one compiled for the same code, versions of
    jax and XLA, flags and devices: its results are the same.
    """
    folder = program_folder(setting, cache, jax.default_backend())
    if folder is None or getattr(jax.config, _FOLDER) is not None:
        yield
        return
    settings = {
        _FOLDER: str(folder),
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        _set(settings)
        yield
    finally:
        _set(before)


def _set(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
