"""Programs kept between starts: where, and that the second start compiles nothing."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from memjax.errors import ConfigError
from memjax.train.config import TrainConfig
from memjax.train.kept_programs import kept_programs, program_folder

START = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
from memjax.train import kept_programs

kept_programs._LEAST_SECONDS = 0.0
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
with kept_programs.kept_programs(sys.argv[1], Path("unused")):
    print(float(jax.jit(lambda x: jnp.sum(jnp.sin(x) ** 2))(jnp.arange(8.0))))
print(sum(name.endswith("compilation_cache/cache_hits") for name in found) > 0)
print(jax.config.jax_compilation_cache_dir)
"""


def test_where():
    cache = Path("/cache")
    assert program_folder("auto", cache, "cpu") is None
    assert program_folder("auto", cache, "gpu") == cache / "compiled"
    assert program_folder("off", cache, "gpu") is None
    assert program_folder("/own", cache, "cpu") == Path("/own")
    with pytest.raises(ConfigError, match="compilation_cache = ''"):
        TrainConfig(compilation_cache="")


def test_a_second_start_finds_the_programs_and_says_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", START, str(tmp_path / "kept")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        lines.append(done.stdout.split())
    assert any((tmp_path / "kept").iterdir())
    assert not Path("unused").exists()
    assert [line[1:] for line in lines] == [["False", "None"], ["True", "None"]]
    assert lines[0][0] == lines[1][0]


def test_a_folder_that_jax_has_stays(tmp_path):
    """The fixture of this folder has told jax of one."""
    before = jax.config.jax_compilation_cache_dir
    assert before is not None
    with kept_programs(str(tmp_path / "other"), tmp_path):
        assert jax.config.jax_compilation_cache_dir == before
