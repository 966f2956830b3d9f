"""Sinkhorn momentum on an active set of rows, in float64, row by row."""

import numpy as np


class ActiveSet:
    """One table of updates: momentum with time stamps, and a set of active rows.

    A row outside the set stores its momentum and the step it belongs to. `total` and
    `bound` are the sum, and the largest that ever left, of the norms outside.
    """

    def __init__(
        self, n_rows, width, *, capacity, beta, n_iterations, tau, eps, slack, norm="l2"
    ):
        self.capacity, self.beta, self.n_iterations = capacity, beta, n_iterations
        self.tau, self.eps, self.slack, self.norm = tau, eps, slack, norm
        self.stored = np.zeros((n_rows, width))
        self.stamp = np.zeros(n_rows, int)
        self.active: set[int] = set()
        self.total = self.bound = 0.0
        self.step_number = self.dense_steps = self.overflow_steps = 0

    def length(self, rows, axis=None):
        if self.norm == "l1":
            return np.abs(rows).sum(axis)
        return np.sqrt(np.square(rows).sum(axis))

    def momentum(self, row, step):
        """The true momentum of a row that had no gradient since its stamp."""
        return self.beta ** (step - self.stamp[row]) * self.stored[row]

    def step(self, gradients):
        """The direction [R, W] of one step; `gradients` maps the rows read to theirs.

        Also returns, for every row, its norm over the threshold of the mask.
        """
        beta, before = self.beta, self.step_number
        self.step_number = now = before + 1
        n_rows, width = self.stored.shape
        enter = [row for row in gradients if row not in self.active]
        overflow = len(self.active) + len(enter) > self.capacity

        # Outside, after this step without a gradient.
        self.total, self.bound = beta * self.total, beta * self.bound
        for row in enter:
            self.total -= beta * self.length(self.momentum(row, before))
        looked_at = set(range(n_rows)) if overflow else self.active | set(enter)
        momentum, ahead = self._look_ahead(gradients, looked_at, before)
        share = sum(self.length(ahead[row]) for row in looked_at)
        mean = (share + (0.0 if overflow else beta * self.total)) / n_rows
        passes = not overflow and beta * self.bound > self.tau * mean
        if passes:
            looked_at = set(range(n_rows))
            momentum, ahead = self._look_ahead(gradients, looked_at, before)
            mean = sum(self.length(ahead[row]) for row in looked_at) / n_rows
        self.overflow_steps += overflow
        self.dense_steps += passes

        norms = {row: self.length(ahead[row]) for row in looked_at}
        kept = [row for row in sorted(looked_at) if norms[row] > self.tau * mean]
        out = np.zeros((n_rows, width))
        out[kept] = self._balance(np.array([ahead[row] for row in kept]))
        stays = [
            row
            for row in sorted(looked_at)
            if norms[row] > self.slack * self.tau * mean or row in gradients
        ]
        self.active = set(stays[: self.capacity])
        for row in looked_at:
            self.stored[row], self.stamp[row] = momentum[row], now
        if overflow or passes:
            self.total = self.bound = 0.0
        for row in looked_at - self.active:
            self.total += self.length(momentum[row])
            self.bound = max(self.bound, self.length(momentum[row]))
        ratio = np.zeros(n_rows)
        for row in looked_at:
            ratio[row] = norms[row] / (self.tau * mean) if mean > 0 else 0.0
        factor = width if self.norm == "l1" else np.sqrt(width)
        return factor * out, ratio

    def _look_ahead(self, gradients, rows, before):
        momentum, ahead = {}, {}
        for row in rows:
            gradient = gradients.get(row, 0.0)
            past = self.momentum(row, before)
            momentum[row] = self.beta * past + (1 - self.beta) * gradient
            ahead[row] = self.beta * momentum[row] + (1 - self.beta) * gradient
        return momentum, ahead

    def _balance(self, u):
        u = u.reshape(-1, self.stored.shape[1])
        for k in range(1, self.n_iterations + 1):
            if k % 2:
                u = u / (self.length(u, 1)[:, None] + self.eps)
            else:
                u = u / (self.length(u, 0) + self.eps)
        return u
