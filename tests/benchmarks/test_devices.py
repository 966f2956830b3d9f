"""Memory per device: what is divided shrinks with the devices, the rest stays."""

import jax
import pytest

from memjax.benchmarks import devices
from memjax.benchmarks.entry import Session
from memjax.benchmarks.process import Local

SESSION = Session(rates={}, open_worker=Local)


@pytest.mark.multidevice
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs simulated devices")
def test_tables_are_halved_and_the_rest_is_not():
    one = devices.program("table", 1, True).make().state()
    (entry,) = (x for x in devices.entries(short=True) if x.name == "devices/table/2")
    two = entry.measure(SESSION).json()
    # Row counts are primes and are padded; the optimizer has scalars.
    assert two["tables_bytes"] == pytest.approx(one["tables_bytes"] / 2, rel=0.01)
    rest = one["state_bytes"] - one["tables_bytes"]
    assert two["state_bytes"] - two["tables_bytes"] == rest > 0
    assert two["temp_bytes"] > 0 and two["ours_ms"] is None
    batch = 5 * 4 * 8 * 16 // 2
    total = two["state_bytes"] + batch + two["temp_bytes"]
    assert total <= two["device_bytes"] < total + 4096
    assert "iB on each device: state" in two["notes"][0]


def test_the_published_form():
    names = [entry.name for entry in devices.entries(short=False)]
    assert names == [
        *(f"devices/table/{n}" for n in (1, 2, 4, 8)),
        *(f"devices/fsdp/{n}" for n in (2, 4, 8)),
    ]
    program = devices.program("table", 8, False)
    assert program.variables["JAX_NUM_CPU_DEVICES"] == "8"
    assert devices.experiment("fsdp", 4, False).mesh.fsdp == 4
