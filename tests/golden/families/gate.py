"""Family gate: the scalar gates and their slopes."""

from functools import partial

import jax

from memjax.ops.gates import plain_gate, signed_sqrt_gate
from tests.golden.case import Case

_GATES = {
    "demo": partial(signed_sqrt_gate, zero="sign"),
    "v41": partial(signed_sqrt_gate, zero="copysign"),
    "paper_plain_sigmoid": plain_gate,
}


def run(case: Case) -> None:
    case.expect_arrays({"dot"} | {f"{k}_{n}" for k in ("gate", "grad") for n in _GATES})
    dot = jax.numpy.asarray(case.data["dot"])
    for name, gate in _GATES.items():
        case.close(f"gate_{name}", gate(dot))
        if f"grad_{name}" in case.data:
            case.close(f"grad_{name}", jax.vmap(jax.grad(gate))(dot))
