"""Published rates of accelerators, and how long their links take.

What: `Chip`, the table `CHIPS`, and times of collectives between equal groups of chips.
Why: a plan divides bytes and operations by rates; these are all in one place, each with
    its source.
When not: measuring. These are peaks; nothing here ran on such a chip, but for the copy
    rate of the H200.
"""

import math
from dataclasses import dataclass

from memjax.errors import ConfigError

USABLE_FLOPS = 0.4
"""The part of the peak that training runs are said to reach; a plan shows both."""

_GB, _GIB, _TB, _T = 1e9, 2**30, 1e12, 1e12


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator. Rates are bytes or operations a second, for one chip.

    Attributes:
        title: for people.
        memory: bytes of its memory.
        memory_rate: published rate of its memory; copy_rate: what a copy reaches (the
            published rate where nobody measured one).
        flops: of dense bfloat16 matrix products; flops_float32: of float32 ones as jax
            computes them by default (on a TPU in one bfloat16 pass, on a GPU in TF32).
        link_rate: one way, all links to other chips of the torus or the node together.
        torus_axes: axes of the torus that chips are wired in; 0: a switch joins a node.
        torus_link_rate: one way, one link of the torus; 0 without one.
        torus_joined: chips from which on the ends of an axis are joined.
        node: chips that a switch joins, or that share a host.
        net_rate: one way between nodes, for one chip; 0 where the torus goes on.
        host_rate: one way from the memory of the host.
        host_memory: bytes of the host's memory for each of its chips.
        row_s: seconds that a gather takes for a row, whatever its width; 0: not known.
        source: of these figures.
    """

    title: str
    memory: float
    memory_rate: float
    copy_rate: float
    flops: float
    flops_float32: float
    link_rate: float
    torus_axes: int = 0
    torus_link_rate: float = 0.0
    torus_joined: int = 0
    node: int
    net_rate: float = 0.0
    host_rate: float
    host_memory: float
    row_s: float = 0.0
    source: str

    def matmul_rate(self, dtype: str) -> float:
        """Operations a second of matrix products of a dtype name."""
        return self.flops if dtype == "bfloat16" else self.flops_float32


_TPU = "docs.cloud.google.com/tpu/docs"
_TPU_REST = (
    "PCIe and joined axes: the Scaling Book; rate of rows: measured on TPU 7x, jax's "
    "docs/pallas/tpu/sparsecore.md"
)
_HOPPER = (
    "NVIDIA's data sheet of the H100 and H200 SXM (dense rates); InfiniBand "
    "400 Gb/s for each chip and PCIe 5 x16 assumed"
)

CHIPS = {
    "v5p": Chip(
        title="TPU v5p",
        memory=95 * _GIB,
        memory_rate=2.77 * _TB,
        copy_rate=2.77 * _TB,
        flops=459 * _T,
        flops_float32=459 * _T,
        link_rate=600 * _GB,
        torus_axes=3,
        torus_link_rate=100 * _GB,
        torus_joined=4,
        node=4,
        host_rate=15 * _GB,
        host_memory=448 * _GB / 4,
        row_s=4.3e-9,
        source=f"{_TPU}/v5p; {_TPU_REST}",
    ),
    "v6e": Chip(
        title="TPU v6e",
        memory=32 * _GB,
        memory_rate=1.6 * _TB,
        copy_rate=1.6 * _TB,
        flops=918 * _T,
        flops_float32=918 * _T,
        link_rate=400 * _GB,
        torus_axes=2,
        torus_link_rate=100 * _GB,
        torus_joined=16,
        node=8,
        host_rate=15 * _GB,
        host_memory=1536 * _GIB / 8,
        row_s=4.3e-9,
        source=f"{_TPU}/v6e; {_TPU_REST}",
    ),
    "h100": Chip(
        title="NVIDIA H100 SXM",
        memory=80 * _GB,
        memory_rate=3.35 * _TB,
        copy_rate=3.35 * _TB,
        flops=989 * _T,
        flops_float32=494 * _T,
        link_rate=450 * _GB,
        node=8,
        net_rate=50 * _GB,
        host_rate=64 * _GB,
        host_memory=2000 * _GB / 8,
        source=_HOPPER,
    ),
    "h200": Chip(
        title="NVIDIA H200 SXM",
        memory=141 * _GB,
        memory_rate=4.8 * _TB,
        copy_rate=4.3 * _TB,
        flops=989 * _T,
        flops_float32=494 * _T,
        link_rate=450 * _GB,
        node=8,
        net_rate=50 * _GB,
        host_rate=64 * _GB,
        host_memory=2000 * _GB / 8,
        source=f"{_HOPPER}; copy rate measured on one",
    ),
}


def chip_named(name: str) -> Chip:
    """The chip; ConfigError names those there are."""
    if name not in CHIPS:
        raise ConfigError("chip", name, f"one of {sorted(CHIPS)}")
    return CHIPS[name]


def torus_shape(n_chips: int, n_axes: int) -> tuple[int, ...]:
    """The shape of n_chips whose longest axis is shortest: 128 on 3 axes is 4, 4, 8."""
    if n_axes == 1:
        return (n_chips,)
    shapes = [
        tuple(sorted((first, *torus_shape(n_chips // first, n_axes - 1))))
        for first in range(1, n_chips + 1)
        if n_chips % first == 0
    ]
    return min(shapes, key=lambda shape: tuple(reversed(shape)))


def bisection_rate(chip: Chip, n_chips: int) -> float:
    """Bytes a second one way through the narrowest cut in halves of a torus.

    Each line of chips along the longest axis is cut in one link, or in two where its
    ends are joined.
    """
    longest = torus_shape(n_chips, chip.torus_axes)[-1]
    cuts = 2 if longest >= chip.torus_joined else 1
    return cuts * (n_chips // longest) * chip.torus_link_rate


def exchange_s(chip: Chip, n_bytes: float, n: int, stride: int = 1) -> float:
    """Seconds of an all-to-all: each of n chips sends n_bytes, in equal parts to all.

    Args:
        chip: whose links.
        n_bytes: what a chip holds for the group, itself included.
        n: chips of the group.
        stride: distance of neighbours of the group, in chips; decides how many of them
            share a node.
    """
    if n == 1:
        return 0.0
    if chip.torus_axes:
        across = n * n_bytes / 4 / bisection_rate(chip, n)
        return max(across, n_bytes * (n - 1) / n / chip.link_rate)
    near = min(n, max(1, chip.node // stride))
    far_s = n_bytes * (n - near) / n / chip.net_rate
    return max(far_s, n_bytes * (near - 1) / n / chip.link_rate)


def scatter_s(chip: Chip, n_bytes: float, n: int, stride: int = 1) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of n_bytes over n chips.

    n_bytes is the whole array: what a chip starts, or ends, with. On a torus all links
    of a chip are taken to work; between nodes, each chip of a node moves its share.
    """
    if n == 1:
        return 0.0
    if chip.torus_axes:
        return n_bytes * (n - 1) / n / chip.link_rate
    near = min(n, max(1, chip.node // stride))
    far = math.ceil(n / near)
    inside_s = n_bytes * (near - 1) / near / chip.link_rate
    return max(inside_s, n_bytes / near * (far - 1) / far / chip.net_rate)


def all_reduce_s(chip: Chip, n_bytes: float, n: int, stride: int = 1) -> float:
    """Seconds of an all-reduce of n_bytes over n chips: a scatter and a gather."""
    return 2 * scatter_s(chip, n_bytes, n, stride)
