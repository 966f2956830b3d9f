"""Product-key benchmarks: sizes, floors, memory, and that PyTorch computes the same."""

import pytest

from memjax.benchmarks import product_keys
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
