"""Family fnv: 64-bit FNV-1a of byte windows, and their rows."""

import jax
import numpy as np

from memjax.ops import byte_hash
from tests.golden.case import Case


def run(case: Case) -> None:
    assert case.settings.take("prime") == byte_hash.FNV_PRIME
    known = {"bytes", "orders", "slots"}
    orders = tuple(int(n) for n in case.data["orders"])
    slots = tuple(int(n) for n in case.data["slots"])
    for basis, start in byte_hash.FNV_BASES.items():
        assert case.settings.take(f"{basis}_basis") == start
        known |= {f"{kind}_{basis}" for kind in ("hash64", "index", "row")}
    case.expect_arrays(known)

    @jax.jit
    def traced(bytes_BT: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        return {
            basis: (
                *byte_hash.byte_fnv(bytes_BT, orders, basis=basis),
                byte_hash.byte_fnv_rows(bytes_BT, orders, slots, basis=basis),
            )
            for basis in byte_hash.FNV_BASES
        }

    for basis, arrays in traced(case.data["bytes"]).items():
        want = case.data[f"hash64_{basis}"]
        high, low, rows = map(np.asarray, arrays)
        case.equal("high half", high, want >> np.uint64(32))
        case.equal("low half", low, want & np.uint64(0xFFFFFFFF))
        case.equal(f"row_{basis}", rows)
        host = byte_hash.host_byte_fnv(case.data["bytes"], orders, basis=basis)
        case.equal(f"hash64_{basis}", host)
        rows = byte_hash.host_byte_fnv_rows(
            case.data["bytes"], orders, slots, basis=basis
        )
        case.equal(f"row_{basis}", rows)
        case.equal(f"index_{basis}", rows - np.cumsum((0, *slots))[:-1])
