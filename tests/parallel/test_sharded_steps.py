"""The same steps on any mesh: losses, shares of a device, collectives, checkpoints."""

import math
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.parallel.division import divisions_of
from memjax.parallel.mesh import MeshConfig
from memjax.train.checkpoint import Checkpoints
from memjax.train.state import state_leaves
from tests.parallel.mesh_runs import N_STEPS, experiment, go_on, parts_on, program, run

pytestmark = pytest.mark.multidevice

ONE = (MeshConfig(), 1)
FSDP = (MeshConfig(data=1, fsdp=8), 8, 2)  # and two micro-batches
BY_ROWS = (MeshConfig(data=2, tensor=2, table=2),)
HASH = (MeshConfig(data=1, fsdp=2, tensor=2, table=2, table_by="hash_columns"),)
MESHES = {"fsdp": FSDP, "rows": BY_ROWS, "hash_columns": HASH}


def whole(found: Any, state: Any) -> dict[str, np.ndarray]:
    """Parameters and averages by path, tables without their padding."""
    tables = found.parts.tables
    divisions = divisions_of(tables.layout)
    leaves = state_leaves((state.params, state.ema))
    host = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    for path, n_rows in tables.layout["rows"].items():
        stored = host[f"0/{path}"]
        host[f"0/{path}"] = divisions[path].joined(stored, n_rows)
    return host


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_like_one_device(mesh: str) -> None:
    want, got = run(*ONE), run(*MESHES[mesh])
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)
    assert got.losses[2] < got.losses[0] - 0.1
    expected = whole(program(*ONE), want.state)
    for path, leaf in whole(program(*MESHES[mesh]), got.state).items():
        np.testing.assert_allclose(leaf, expected[path], atol=2e-4, err_msg=path)


def share(leaf: Any) -> tuple[int, ...]:
    shapes = {shard.data.shape for shard in leaf.addressable_shards}
    assert len(shapes) == 1
    return shapes.pop()


def test_a_device_holds_its_share_of_parameters_average_and_optimizer() -> None:
    """Every matrix is an eighth under fsdp, half of a half under fsdp and tensor; the
    moments and the average are like the parameter; vectors are whole."""
    params = state_leaves(run(*FSDP).state.params)
    tables = program(*FSDP).parts.row_tables
    for path, leaf in params.items():
        split = leaf.ndim > 1 and path not in tables
        gain = path.endswith(("scale", "weight"))
        n_parts = leaf.size // math.prod(share(leaf))
        assert n_parts == (8 if split and not gain else 1), path
    state = run(*HASH).state
    params = state_leaves(state.params)
    wanted = {
        "embedding": (257, 8),  # 257 does not divide over tensor
        "head": (257, 8),
        "block_0/attention/query/kernel": (8, 8),
        "block_0/attention/key/kernel": (8, 4),
        "block_0/attention/out/kernel": (8, 8),
        "block_0/feed_forward/gate/kernel": (8, 16),
        "block_0/feed_forward/out/kernel": (16, 8),
        "block_0/memory/kv/kernel": (8, 32),
        "block_0/attention_norm/scale": (16,),
        "block_1/memory/keys": (1, 2, 4, 4),
        "block_1/memory/table": (32, 16),
    }
    for path, shape in wanted.items():
        assert share(params[path]) == shape, path
    like = 0
    for path, leaf in (
        state_leaves(state.opt_state) | state_leaves(state.ema) | {"step": state.step}
    ).items():
        names = path.split("/")
        ends = ["/".join(names[i:]) for i in range(len(names))]
        of = next((params[end] for end in ends if end in params), None)
        want = leaf.shape if of is None or of.shape != leaf.shape else share(of)
        assert share(leaf) == want, path
        like += of is not None and share(leaf) != leaf.shape
    n_split = sum(share(p) != p.shape for p in params.values()) - 2  # but for tables
    assert like == 3 * n_split  # two moments and the average
    for path, leaf in state_leaves(state.table_state).items():
        assert leaf.ndim == 0 or share(leaf)[0] == leaf.shape[0] // 2, path


def collectives(text: str) -> list[tuple[str, list[str], str]]:
    """(kind, shapes of the results, name of the operation) of a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    found = []
    for line in text.splitlines():
        hit = re.search(rf"= (.*?) ({kinds})(-start)?\(", line)
        if hit:
            name = re.search(r'op_name="([^"]*)"', line)
            shapes = re.findall(r"\w+\[([\d,]*)\]", hit[1])
            found.append((hit[2], shapes, name[1] if name else ""))
    return found


def test_what_the_compiled_steps_exchange() -> None:
    """Never a table, and never a sum over devices of the rows that Engram reads: by
    hash columns they are exchanged, by rows they are added up where they belong."""
    for mesh in (BY_ROWS, HASH):
        found = program(*mesh)
        rows = [f"{leaf.shape[0]}," for leaf in _tables(found.abstract.params)]
        reads = set()
        for kind, shapes, name in collectives(found.step.as_text()):
            for shape in shapes:
                assert not shape.startswith(tuple(rows)), (kind, shape, name)
            if "memory.retrieve" in name:
                reads.add(kind)
        by_rows = {"all-gather", "reduce-scatter"}
        assert reads == (by_rows if mesh is BY_ROWS else {"all-to-all"})
    # A device selects slots for its own rows of the batch.
    for mesh in (FSDP, HASH):
        for kind, shapes, name in collectives(program(*mesh).step.as_text()):
            assert "top_k" not in name, (kind, shapes, name)
    # Under fsdp weights go to the batch, and the batch goes nowhere.
    kinds = {kind for kind, *_ in collectives(program(*FSDP).step.as_text())}
    assert "all-gather" in kinds and "all-to-all" not in kinds


def _tables(params: Any) -> list[Any]:
    return [x for path, x in state_leaves(params).items() if path.endswith("/table")]


def test_a_checkpoint_of_one_mesh_goes_on_on_others(tmp_path: Any) -> None:
    """Saved where tables are divided by hash columns, restored where they are divided
    by rows, on one device, and as it was: the next loss is the same."""
    saved, losses = program(*HASH), []
    with Checkpoints(tmp_path, tables=saved.parts.tables) as checkpoints:
        state = run(*HASH).state
        checkpoints.save(state, data=N_STEPS, fingerprint={})
    want = whole(saved, state)
    for mesh in (HASH, BY_ROWS, FSDP, ONE):
        found = program(*mesh)
        with Checkpoints(tmp_path, tables=found.parts.tables) as checkpoints:
            restored = checkpoints.restore_newest(found.abstract, {})
        assert restored is not None and restored.data == N_STEPS
        for path, leaf in whole(found, restored.state).items():
            np.testing.assert_array_equal(leaf, want[path], err_msg=path)
        for x, y in zip(
            jax.tree.leaves(restored.state),
            jax.tree.leaves(found.abstract),
            strict=True,
        ):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        losses += go_on(found, restored.state, range(N_STEPS, N_STEPS + 1)).losses
    np.testing.assert_allclose(losses, losses[0], rtol=2e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor": 8}, r"model.n_heads = 4.*mesh.tensor = 8.*\('heads', None\)"),
        ({"tensor": 4}, r"model.n_kv_heads = 2.*mesh.tensor = 4.*'kv_heads'"),
        ({"tensor": 2, "rules": (("embed", "tensor"),)}, "mesh.rules = .*'embed' and"),
        (
            {"tensor": 2, "rules": (("vocab", "tensor"),)},
            "model.vocab_size = 257.*mesh.tensor = 2",
        ),
        (
            {"tensor": 2, "rules": (("vocab", "fsdp"),)},
            r"mesh.rules = \(\('vocab', 'fsdp'\), \('embed', 'fsdp'\)\).*axes of embed",
        ),
        ({"rules": (("mpl", "tensor"),)}, "mesh.rules.0 = 'mpl'.*mlp"),
        ({"rules": (("mlp", "data"),)}, "mesh.rules.0 = 'data'.*fsdp"),
        ({"rules": (("mlp", None), ("mlp", "fsdp"))}, "mesh.rules.1 = 'mlp'.*one rule"),
        ({"rules": (("mlp",),)}, "mesh.rules.0.*a pair"),
        ({"rules": "mlp"}, "mesh.rules = 'mlp'.*tuple of pairs"),
        ({"fsdp": 32}, "data.batch_size = 16.*mesh.fsdp.*32"),
        (
            {"table": 3, "table_by": "hash_columns"},
            "mesh.table = 3.*divisor of the 4 hash columns of block_0/memory/table",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(settings: Any, message: str) -> None:
    n_devices = math.prod(x for x in settings.values() if isinstance(x, int))
    with pytest.raises(ConfigError, match=message):
        experiment(MeshConfig(**settings)).validate(n_devices)


def test_the_width_of_the_stream_divides_over_fsdp() -> None:
    base = experiment(MeshConfig(data=1, fsdp=3))
    rows = replace(base.data, batch_size=6, eval_batch_size=6)
    with pytest.raises(ConfigError, match="model.d_model = 16.*mesh.fsdp = 3"):
        replace(base, data=rows).validate(3)


def test_rules_of_the_user_come_first() -> None:
    rules = (("kv_heads", None), ("vocab", None), ("mlp", "fsdp"), ("embed", None))
    parts = parts_on(MeshConfig(data=1, fsdp=2, tensor=4, rules=rules), 8)
    assert parts.placement is not None
    shardings = state_leaves(parts.placement(parts.split(parts.abstract)[0]))
    assert shardings["block_0/attention/key/kernel"].is_fully_replicated
    assert shardings["block_0/attention/query/kernel"].spec == jax.P(None, "tensor")
    assert shardings["block_0/feed_forward/up/kernel"].spec == jax.P(None, "fsdp")
    assert shardings["block_0/memory/kv/kernel"].spec == jax.P("fsdp")
    # Where weights are split over fsdp, activations are by the batch alone.
    assert parts.activations is not None
    inner = parts.activations(jax.numpy.zeros((2, 3, 32)), ("batch", None, "mlp"))
    assert share(inner) == (1, 3, 32)
    inner = parts.activations(jax.numpy.zeros((1, 3, 32)), ("batch", None, "mlp"))
    assert share(inner) == (1, 3, 16)
