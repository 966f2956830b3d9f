"""Algorithm 1 of arXiv:2609.19969 in float64, entry by entry."""

import math

import numpy as np


def _length(values: list[float], norm: str) -> float:
    if norm == "l1":
        return sum(abs(value) for value in values)
    return math.sqrt(sum(value * value for value in values))


def balance(
    update: np.ndarray, n_iterations: int, tau: float, eps: float, norm: str = "l2"
) -> np.ndarray:
    """Mask the weak rows, then divide rows and columns by their norms in turn."""
    u = np.array(update, np.float64)
    n_rows, n_columns = u.shape
    lengths = [_length(list(u[i]), norm) for i in range(n_rows)]
    mean = sum(lengths) / n_rows
    for i in range(n_rows):
        if lengths[i] <= tau * mean:
            u[i] = 0.0
    for k in range(1, n_iterations + 1):
        if k % 2 == 1:
            for i in range(n_rows):
                length = _length([u[i, j] for j in range(n_columns)], norm)
                for j in range(n_columns):
                    u[i, j] = u[i, j] / (length + eps)
        else:
            for j in range(n_columns):
                length = _length([u[i, j] for i in range(n_rows)], norm)
                for i in range(n_rows):
                    u[i, j] = u[i, j] / (length + eps)
    return u


def steps(
    gradients: list[np.ndarray],
    beta: float,
    n_iterations: int,
    tau: float,
    eps: float,
    norm: str = "l2",
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(direction, momentum) after every gradient, momentum starting at zero."""
    momentum = np.zeros(gradients[0].shape)
    out = []
    for gradient in gradients:
        gradient = np.array(gradient, np.float64)
        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum + (1 - beta) * gradient
        n_columns = gradient.shape[1]
        factor = float(n_columns) if norm == "l1" else math.sqrt(n_columns)
        out.append((factor * balance(ahead, n_iterations, tau, eps, norm), momentum))
    return out
