"""Settings shared by every test.

What: eight simulated CPU devices, quick compilation, the `--golden-root` option, one
hypothesis profile.
Why: the number of devices must be chosen before a jax backend starts; tests compile
hundreds of small programs and run each a few times.
When not: fixtures that only one folder needs stand in that folder's conftest.
"""

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)

settings.register_profile(
    "memjax", deadline=None, max_examples=25, derandomize=True, database=None
)
settings.load_profile("memjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-root",
        action="append",
        default=None,
        metavar="DIR",
        help="folder with a manifest.json of recorded numbers; may be repeated",
    )
