"""What an ordinary step of `sinkhorn_rows` does with the table, in its program."""

import re

import jax
import jax.numpy as jnp

from memjax.ops.row_gradient import UniqueRows
from memjax.optim.sinkhorn_rows import sinkhorn_rows

N_ROWS, WIDTH, N_READ = 300_000, 16, 64
# What neither reads nor writes all of an operand; a scatter into a donated table
# writes its rows, and the loops run over blocks of the buffer, or (dense) not at all.
IN_PLACE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "scatter"}
RESULT = re.compile(r"^\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z\-]+)\(", re.MULTILINE)


def test_no_pass_over_the_table_in_an_ordinary_step():
    """Outside of loops nothing is as large as the table but what stays in place."""
    optimizer = sinkhorn_rows(0.1, capacity=4096)
    table = jax.ShapeDtypeStruct((N_ROWS, WIDTH), jnp.float32)
    rows = UniqueRows(
        jax.ShapeDtypeStruct((N_READ,), jnp.int32),
        jax.ShapeDtypeStruct((N_READ, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    state = jax.eval_shape(optimizer.init, table)

    def step(rows, table, state):
        # In the order of the results: jax pairs donated arrays of one shape by order.
        return optimizer.apply(rows, state, table)

    step = jax.jit(step, donate_argnums=(1, 2))
    text = step.lower(rows, table, state).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    large = {
        opcode
        for shape, opcode in RESULT.findall(entry)
        if f"[{N_ROWS}" in shape and not shape.startswith("(")
    }
    fused = {opcode for opcode in large if opcode == "fusion"}
    for line in entry.splitlines():
        if "fusion(" in line and f"[{N_ROWS}" in line.partition("fusion(")[0]:
            # A fusion may only be a scatter with what computes its indices.
            assert "scatter" in line, line
    assert large - fused <= IN_PLACE, large
    assert "while" in entry
