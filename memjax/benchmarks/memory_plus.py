"""Memory+: read, and read and backward.

What: `entries`, with the sides of `product_keys`.
Why: the layer that was trained at scale (arXiv:2412.09764), with its gate.
When not: its whole step, which differs from that of `product_keys` by three matrices.
"""

from memjax.benchmarks.entry import Entry
from memjax.benchmarks.product_keys import FORMS, ProductKeyCase, duel


def entries(short: bool) -> list[Entry]:
    """Both parts at 512 sub-keys and width 512."""
    sizes: dict[str, int] = {}
    if short:
        sizes = dict(
            n_sub_keys=32, width=32, n_tokens=256, n_heads=2, k=8, half_width=16
        )
    made = []
    for part in ("read", "read_backward"):
        cases = [
            ProductKeyCase(part=part, form=form, layer="memory_plus", **sizes)
            for form in (FORMS if part != "read" else FORMS[:1])
        ]
        made.append(duel("memory_plus", cases).entry())
    return made
