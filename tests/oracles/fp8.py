"""8-bit floats by their definition, in fractions: one code, one entry at a time."""

import math
from fractions import Fraction

import numpy as np


def e4m3fn(code: int) -> Fraction | None:
    """The value of a code; None for NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        size = Fraction(mantissa, 8) * Fraction(2) ** -6
    else:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if code & 128 else size


def e8m0(code: int) -> Fraction | None:
    """The value of a scale; None for NaN."""
    return None if code == 255 else Fraction(2) ** (code - 127)


def scale_of(block: list[float]) -> int:
    """The scale code of a block of finite numbers."""
    amax = max(Fraction(float(x)) for x in np.abs(np.array(block, np.float32)))
    floored = max(amax, Fraction(float(np.float32(1e-4))))
    # The product is rounded to float32, as in the kernel.
    ratio = Fraction(float(np.float32(float(floored)) * np.float32(1 / 448)))
    power = -200
    while Fraction(2) ** power < ratio:
        power += 1
    return power + 127


def code_of(x: float, scale: int) -> int:
    """The nearest code to x / scale, of two equally near the even one."""
    scaled = Fraction(float(np.float32(x))) / e8m0(scale)
    scaled = min(max(scaled, Fraction(-448)), Fraction(448))
    codes = [c for c in range(128) if e4m3fn(c) is not None]
    best = min(codes, key=lambda c: (abs(e4m3fn(c) - abs(scaled)), c % 2))
    return best + (128 if math.copysign(1, x) < 0 else 0)


def quantize(rows: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of rows of finite numbers."""
    codes = np.zeros(rows.shape, np.uint8)
    scales = np.zeros((len(rows), rows.shape[1] // block), np.uint8)
    for r, row in enumerate(rows):
        for b in range(scales.shape[1]):
            at = slice(b * block, (b + 1) * block)
            scales[r, b] = scale_of(row[at].tolist())
            for i, x in enumerate(row[at].tolist()):
                codes[r, b * block + i] = code_of(x, int(scales[r, b]))
    return codes, scales
