"""Product-key benchmarks: sizes, floors, memory, and that PyTorch computes the same."""

import pytest

from memjax.benchmarks import product_keys
from memjax.benchmarks.duel import Duel
from memjax.benchmarks.product_keys import PARTS, ProductKeyCase, duel
from tests.benchmarks.sides import compare, needs_torch

SMALL = dict(n_sub_keys=6, width=8, n_tokens=16, n_heads=2, k=4, half_width=4)


def case(part, form, layer="xlm"):
    return ProductKeyCase(part=part, form=form, layer=layer, **SMALL)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("form", product_keys.FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_both_sides_compute_the_same(part, form, tmp_path):
    compare(duel("product_keys", [case(part, form)]), tmp_path, tolerance=1e-4)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("part", ["read", "read_backward"])
def test_both_sides_of_memory_plus(part, tmp_path):
    one = duel("memory_plus", [case(part, "rows", "memory_plus")])
    compare(one, tmp_path, tolerance=1e-4)


@pytest.mark.torch
@needs_torch
def test_pytorch_finds_the_best_of_the_grid_among_fewer_pairs():
    """Both ways to select give the same slots in the same order."""
    from memjax.benchmarks.product_keys_torch import _Memory

    memory = _Memory(case("read", "dense"))
    grid, pairs = memory.grid(), memory.pairs()
    assert all((a == b).all() for a, b in zip(grid, pairs, strict=True))


def test_a_peer_that_computes_something_else_is_found(tmp_path):
    (ours, _) = duel("x", [case("read", "dense")]).forms["dense"]
    (other, _) = duel("x", [case("read", "dense", "memory_plus")]).forms["dense"]
    with pytest.raises(AssertionError, match="'y'"):
        compare(Duel(name="x", forms={"dense": (ours, other)}), tmp_path, 0.1)


def test_the_published_sizes_targets_and_floors():
    made = product_keys.entries(short=False)
    assert [entry.name for entry in made] == [
        f"product_keys/{part}/{size}"
        for size in ("n512_d512", "n1024_d512", "n2048_d128")
        for part in PARTS
    ]
    assert list(product_keys.SIZES.values()) == [1.4, 2.2, 1.2]
    rates = {"copy_gb_s": 10.0, "matmul_gflops": 100.0}
    read = ProductKeyCase(part="read").work()
    flops = 2 * 4096 * (512 * 1024 + 8 * 128 * 512)
    rows = 4096 * 128 * 512 * 4
    assert read.floor_ms(rates) == pytest.approx(1e3 * (flops / 1e11 + rows / 1e10))
    floors = [ProductKeyCase(part=part).work().floor_ms(rates) for part in PARTS]
    assert floors == sorted(floors) and floors[0] < floors[1] < floors[2]


def test_memory_that_is_asked_for():
    """Three tables and a gradient, as was measured: 3.1 and 8.8 GB."""
    small = ProductKeyCase(part="step").need_bytes()
    large = ProductKeyCase(part="step", n_sub_keys=1024).need_bytes()
    assert 3.0e9 < small[0] < 3.6e9 and 8.8e9 < large[0] < 10e9
    assert sum(large) < 23e9
    rows = ProductKeyCase(part="step", form="rows", n_sub_keys=1024).need_bytes()
    assert rows[0] > large[0] and rows[1] > large[1]
