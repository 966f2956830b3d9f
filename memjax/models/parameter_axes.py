"""The logical axes of the model's parameters.

What: `parameter_axes`, from a leaf's path and shape.
Why: how a parameter is divided over devices follows from what its axes are.
When not: which mesh axis that is; see `parallel.logical_axes`.
"""

from memjax.parallel.logical_axes import Names

_ATTENTION = {
    "query": ("embed", "heads"),
    "key": ("embed", "kv_heads"),
    "value": ("embed", "kv_heads"),
    "out": ("heads", "embed"),
}
_FEED_FORWARD = {
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "out": ("mlp", "embed"),
    "router": ("embed", None),
}


def parameter_axes(path: str, shape: tuple[int, ...]) -> Names:
    """A logical axis of `parallel.logical_axes`, or None, for each axis of a parameter.

    Args:
        path: such as "block_0/attention/query/kernel"; under "blocks_0_2/..." (scanned
            blocks) the first axis is that of the layers.
        shape: of the parameter.

    Gains, biases and other vectors, and small arrays without a rule, have no names and
    are whole on every device.
    """
    names = path.split("/")
    if names[0].startswith("blocks_"):
        inner = path.split("/", 1)[1]
        return ("layers", *parameter_axes(f"block_0/{inner}", shape[1:]))
    return (None,) * len(shape) if len(shape) < 2 else _axes(names, len(shape))


def _axes(names: list[str], n_axes: int) -> Names:
    leaf, owner = names[-1], names[-2] if len(names) > 1 else ""
    found: Names = ()
    if len(names) == 1 and leaf in ("embedding", "head", "memory_head"):
        found = ("vocab", "embed")
    elif leaf == "table" or leaf.endswith("_table") or leaf == "embedding":
        found = ("table_rows", "table_width")
    elif leaf == "kernel" and {"attention", "source"} & {*names[:2]}:
        found = _ATTENTION.get(owner, ())
    elif leaf == "kernel" and names[1:2] == ["feed_forward"]:
        found = _FEED_FORWARD.get(owner, ())
        if n_axes == 3 or "shared" in names:
            found = tuple("expert_mlp" if x == "mlp" else x for x in found)
        if n_axes == 3:
            found = ("experts", *found)
    elif leaf in ("keys", "fixed_keys"):
        found = ("sub_keys", None)
    if not found and leaf.startswith("kernel"):
        found = ("kernel_in", "kernel_out")
    return (*(None,) * (n_axes - len(found)), *found)
