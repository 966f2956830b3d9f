"""Family fp8: values of all codes, rows of a quantised table, and the quantiser."""

from typing import Any

import jax
import numpy as np

from memjax.ops.fp8 import dequantize_rows, e4m3fn_values, e8m0_values, quantize_rows
from tests.golden.case import Case

_READ = {"weight_bytes", "scale_bytes", "indices", "rows_bf16_as_f32"}
_QUANTISED = {
    "quant_input",
    "quant_weight_bytes",
    "quant_scale_bytes",
    "quant_dequantised_f32",
}


def run(case: Case) -> None:
    block = case.settings.take("block")
    case.expect_arrays({"e4m3fn_decode", "e8m0_decode"} | _READ | _QUANTISED)
    _same(case, "e4m3fn_decode", e4m3fn_values())
    _same(case, "e8m0_decode", e8m0_values())
    _check_reads(case, block)
    _check_quantiser(case, block)


def _check_reads(case: Case, block: int) -> None:
    codes, scales = case.data["weight_bytes"], case.data["scale_bytes"]
    assert codes.shape[-1] == block * scales.shape[-1], "settings.block differs"
    read = jax.jit(dequantize_rows)
    _same(case, "rows_bf16_as_f32", read(codes, scales, case.data["indices"]))


def _check_quantiser(case: Case, block: int) -> None:
    quantised = jax.jit(quantize_rows, static_argnames="block")
    codes, scales = quantised(case.data["quant_input"], block=block)
    _same(case, "quant_scale_bytes", scales)
    _same(case, "quant_weight_bytes", codes)
    rows = dequantize_rows(codes, scales, np.arange(len(codes)))
    _same(case, "quant_dequantised_f32", rows)


def _same(case: Case, name: str, got: Any) -> None:
    """Bit-equal, signs of zeros among them; a NaN is any NaN."""
    got, want = np.asarray(got), case.data[name]
    got = got.astype(want.dtype)
    case.equal(f"NaN of {name}", np.isnan(got), np.isnan(want))
    case.equal(f"sign of {name}", np.signbit(got), np.signbit(want))
    case.equal(name, np.nan_to_num(got), np.nan_to_num(want))
