"""Plans against what the compiler says of the same step on eight simulated devices.

What: the state's bytes, exactly; activations within a factor; exchanges by their laws;
the plan of the V4.1 tables; the errors of the command.
Why: a plan is believed before anything can be measured.
When not: rates and forms of tables; see tests/report/test_chips.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from memjax.build.activations import Activations, activation_bytes
from memjax.build.host_plan import host_plans
from memjax.build.parts import Parts
from memjax.build.planned_state import abstract_train_state
from memjax.build.planner import plan
from memjax.cli.main import main
from memjax.data.config import DataConfig
from memjax.errors import ConfigError
from memjax.experiment import Experiment, load_experiment, save
from memjax.layers.engram import EngramConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh
from memjax.report.chips import CHIPS
from memjax.report.device_plan import device_plan_text
from memjax.train.config import TrainConfig
from memjax.train.step import make_train_step

V41 = Path(__file__).parent.parent.parent / "experiments" / "v41_pod.py"
STATE = (
    "dense",
    "tables",
    "dense_optimizer",
    "table_optimizer",
    "average",
    "model_state",
)
ENGRAM = EngramConfig(
    layers=(0,), n_heads=2, rows_per_head=500, row_width=8, table_mode="rows"
)


def small(mesh: MeshConfig | None = None, **changes: Any) -> Experiment:
    """A block with a memory; `changes` are fields of the model."""
    model = ModelConfig(
        n_layers=1,
        d_model=32,
        n_heads=4,
        n_kv_heads=2,
        d_ff=64,
        scan_layers=False,
        memories=(ENGRAM,),
    )
    return Experiment(
        name="planned",
        model=replace(model, **changes),
        data=DataConfig(batch_size=64, context=64, eval_stride=64, eval_batch_size=64),
        optim=OptimConfig(ema_decay=0.9, table_optimizer="lazy_adam"),
        train=TrainConfig(n_steps=3),
        mesh=MeshConfig() if mesh is None else mesh,
    )


def compiled(experiment: Experiment) -> Any:
    """What XLA says of the memory of a device during the step."""
    mesh = make_mesh(experiment.mesh, jax.devices()[:8])
    parts = Parts(experiment, mesh)
    state = abstract_train_state(experiment, mesh)
    step = make_train_step(
        parts.training_loss,
        build_optimizer(experiment.optim, parts.dense_labels, 3),
        accumulate_steps=experiment.train.accumulate_steps,
        update_ema=parts.ema.update if parts.ema else None,
        tables=parts.tables,
        mesh=mesh,
        shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    data = experiment.data
    split = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    names = ("tokens", "segments", "positions", "targets", "weights")
    batch = {
        name: jax.ShapeDtypeStruct(
            (data.batch_size, data.context),
            jnp.float32 if name == "weights" else jnp.int32,
            sharding=split,
        )
        for name in names
    }
    return step.lower(state, batch).compile().memory_analysis()


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [
        pytest.param(MeshConfig(data=2, fsdp=2, table=2), 1, marks=pytest.mark.slow),
        (MeshConfig(data=1, fsdp=2, table=4, table_by="columns"), 2),
    ],
)
def test_memory_is_that_of_the_compiled_step(mesh: MeshConfig, accumulate: int) -> None:
    experiment = small(mesh)
    train = replace(experiment.train, accumulate_steps=accumulate)
    experiment = replace(experiment, train=train)
    memory = plan(experiment, "h200", 8)["memory"]
    found = compiled(experiment)
    # The state is donated, so what is written in its place is all of the state.
    assert sum(memory[name] for name in STATE) == found.alias_size_in_bytes
    working = ("gradients", "row_gradients", "activations")
    estimate = sum(memory[name] for name in working)
    assert estimate / 1.6 < found.temp_size_in_bytes < estimate * 1.6
    assert memory["total"] == sum(memory[name] for name in (*STATE, *working))


def test_a_tree_of_one_device_is_counted_whole() -> None:
    memory = plan(small(), "h200", 1)["memory"]
    parts = Parts(small())
    dense, tables = parts.split(parts.abstract)

    def nbytes(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    assert memory["dense"] == memory["average"] == memory["gradients"] == nbytes(dense)
    assert memory["tables"] == nbytes(tables)
    assert memory["table_optimizer"] == pytest.approx(2 * nbytes(tables), abs=64)


def test_a_dense_table_is_a_table_and_has_a_gradient() -> None:
    by_rows = plan(small(), "h200", 1)["memory"]
    memory = replace(ENGRAM, table_mode="dense")
    experiment = small(memories=(memory,))
    optim = replace(experiment.optim, table_optimizer="adam")
    dense = plan(replace(experiment, optim=optim), "h200", 1)["memory"]
    assert dense["tables"] == by_rows["tables"]
    assert dense["dense"] == by_rows["dense"]
    assert dense["gradients"] == by_rows["gradients"] + dense["tables"]
    assert dense["row_gradients"] == 0 < by_rows["row_gradients"]


def test_activations_follow_rows_blocks_and_rematerialisation() -> None:
    def of(n_layers: int, n_rows: int = 1, **changes: Any) -> Activations:
        model = {"memories": (), "remat": True, **changes}
        return activation_bytes(small(n_layers=n_layers, **model), n_rows)

    one, rows = of(1), of(1, 3)
    assert 2.9 < rows.kept / one.kept <= 3 and 2.5 < rows.block / one.block <= 3
    # a rematerialised block keeps its input alone, [64, 32] float32, scanned or not
    stream = 64 * 32 * 4
    assert of(4, scan_layers=True).kept == one.kept + 3 * stream
    assert of(3).kept == one.kept + 2 * stream
    plain = of(1, remat=False)
    assert plain.block == 0
    assert stream < plain.kept - one.kept <= one.block


def test_nothing_travels_on_one_chip_and_axes_travel_apart() -> None:
    assert plan(small(), "v5p", 1)["exchanges"] == []

    def sent(**sizes: Any) -> dict[str, Any]:
        found = plan(small(MeshConfig(**sizes)), "h100", 8)
        return {item["what"]: item for item in found["exchanges"]}

    copies = sent(data=8)
    assert set(copies) == {"dense gradients of copies", "row gradients of copies"}
    gradients = plan(small(), "h100", 1)["memory"]["gradients"]
    assert copies["dense gradients of copies"]["bytes"] == gradients
    divided = sent(data=1, fsdp=8)
    assert divided["dense gradients"]["how"] == "reduce-scatter"
    weights = divided["dense weights, forward and backward"]
    # all but what does not divide, there and back
    assert 1.6 * gradients < weights["bytes"] <= 2 * gradients
    assert sent(data=1, tensor=8 // 4, fsdp=4)["sums of attention and feed-forward"]


def test_rows_are_added_up_and_columns_are_sent() -> None:
    tokens = 64 * 64 // 8
    vectors = 4 * 8 * 4  # reads of a token, 8 float32 each

    def sent(by: str) -> dict[str, Any]:
        mesh = MeshConfig(data=2, table=4, table_by=by)
        found = plan(small(mesh), "h100", 8)
        return {item["what"]: item for item in found["exchanges"]}

    rows, columns = sent("rows"), sent("columns")
    assert rows["rows read"]["how"] == "reduce-scatter"
    assert rows["rows read"]["bytes"] == 4 * tokens * vectors
    assert columns["rows read"]["how"] == "all-to-all"
    assert columns["rows read"]["bytes"] == tokens * vectors
    assert rows["row ids"]["bytes"] == 4 * tokens * 4 * 4
    for found, share in ((rows, 1), (columns, 4)):
        joined = found["row gradients of copies"]["bytes"]
        assert joined == 8 * tokens * vectors // share
    by_hash = sent("hash_columns")
    assert by_hash["row ids"]["how"] == "all-to-all"
    assert by_hash["rows read"] == columns["rows read"]


def test_rows_in_motion_are_moved_whether_read_or_not() -> None:
    optim = OptimConfig(table_optimizer="sinkhorn_momentum")
    experiment = replace(small(), optim=optim)
    found = plan(experiment, "h200", 1)
    (table,) = found["tables"]
    assert table["rows_read"] < table["rows"]
    # row and momentum, float32, there and back
    assert found["memory_traffic"]["table_update"] == table["rows"] * 2 * (32 + 32)
    lazy = plan(small(), "h200", 1)["memory_traffic"]["table_update"]
    assert lazy == pytest.approx(table["rows_read"] * 2 * (32 + 64), rel=0.01)


def test_of_tables_on_the_host_slots_are_held_and_rows_travel() -> None:
    memory = replace(ENGRAM, rows_per_head=50_000, table_mode="host")
    experiment = small(memories=(memory,))
    experiment = replace(experiment, data=replace(experiment.data, hash_on="host"))
    found = plan(experiment, "h200", 1)
    (slots,) = [found.n_slots for found in host_plans(experiment).values()]
    (table,) = found["tables"]
    assert slots < table["rows"] and table["mode"] == "host"
    assert found["memory"]["tables"] == slots * 32
    assert found["memory"]["row_gradients"] == table["reads"] * 32
    # row and two moments, for reads of rows that are not in a slot
    rows = table["rows_read"] * (1 - slots / table["rows"])
    travel = rows * 3 * 32 / CHIPS["h200"].host_rate
    assert found["floor"]["host_s"] == pytest.approx(travel, rel=0.01)
    text = device_plan_text(found)
    assert "rows from the host" in text and "cheaper" not in text
    assert plan(small(), "h200", 1)["floor"]["host_s"] == 0


def test_weighted_sums_are_sent_as_sums() -> None:
    memory = ProductKeyConfig(
        layers=(0,), n_sub_keys=16, key_width=8, n_heads=2, k=4, table_mode="rows"
    )
    mesh = MeshConfig(data=2, table=4)
    found = plan(small(mesh, memories=(memory,)), "h100", 8)
    items = {item["what"]: item for item in found["exchanges"]}
    (table,) = found["tables"]
    assert table["reads_per_token"] == 8 and table["rows"] == 256
    tokens = found["tokens"]
    width = table["width"]
    assert items["rows read"]["how"] == "reduce-scatter"
    assert items["rows read"]["bytes"] == 4 * tokens * width * 4
    assert items["gradients of weights"]["bytes"] == 4 * tokens * 8 * 4
    # nearly every row is read in a step
    assert table["share_read"] > 0.99 and table["cheaper_mode"] == "dense"
    assert "dense is cheaper" in device_plan_text(found)


def test_bounds_and_advice() -> None:
    found = plan(small(), "h200", 1)
    floor, chip = found["floor"], CHIPS["h200"]
    assert floor["compute_s"] == found["flops"]["step"] / chip.flops_float32
    bounds = {name: floor[f"{name}_s"] for name in ("compute", "memory", "links")}
    assert floor["bound"] == max(bounds, key=lambda name: bounds[name])
    assert floor["step_s"] == max(bounds.values())
    assert found["fits"] and found["advice"] == []
    half = replace(small().model.precision, compute="bfloat16")
    faster = plan(small(precision=half), "h200", 1)["floor"]
    assert faster["compute_s"] == pytest.approx(floor["compute_s"] * 494 / 989)
    huge = plan(small(memories=(replace(ENGRAM, rows_per_head=300_000_000),)), "v6e", 1)
    assert not huge["fits"]
    assert huge["advice"][0]["part"] == "tables"
    assert huge["advice"][0]["change"]["mesh.table"] == "larger"
    text = device_plan_text(huge)
    assert "DOES NOT FIT: the chip has 32.0 GB" in text and "mesh.table larger" in text


def test_the_v41_tables_on_a_pod_of_v5p() -> None:
    experiment = replace(
        load_experiment(V41).experiment, mesh=MeshConfig(data=1, fsdp=4, table=32)
    )
    start = time.perf_counter()
    found = plan(experiment, "v5p", 128)
    assert time.perf_counter() - start < 60  # seconds, when the machine is free
    assert found["tokens_per_step"] == 2**22
    assert [t["rows"] for t in found["tables"]] == [384006168, 384016682]
    assert sum(t["bytes_per_token"] for t in found["tables"]) == 24_576
    assert sum(t["reads"] for t in found["tables"]) == 201_326_592
    assert all(t["cheaper_mode"] == "rows" for t in found["tables"])
    assert [round(t["share_read"], 2) for t in found["tables"]] == [0.23, 0.23]
    assert found["flops"]["of_memories_per_token"] == 2 * 2 * 6144 * 25600
    assert round(1e3 * found["floor"]["usable_memories_s"]) == 337
    fp8 = found["forms"][0]
    assert round(fp8["state_bytes"] / 1e9, 1) == 10.8
    assert round(1e3 * fp8["forward_s"], 1) == 4.2
    assert round(1e3 * fp8["back_s"], 1) == 8.1
    assert found["floor"]["bound"] == "compute"
    # stored as bfloat16, over 32 parts
    rows = 384006168 + 384016682
    assert found["memory"]["tables"] == pytest.approx(rows * 512 / 32, rel=1e-6)
    json.dumps(found)


def test_v41_tables_in_fp8_have_no_gradient() -> None:
    experiment = load_experiment(V41).experiment
    (memory,) = experiment.model.memories
    model = replace(experiment.model, memories=(replace(memory, table_mode="fp8"),))
    optim = replace(experiment.optim, table_stochastic_rounding=False)
    found = plan(replace(experiment, model=model, optim=optim), "v5p", 128)
    assert sum(t["bytes_per_token"] for t in found["tables"]) == 12_672
    assert found["memory"]["row_gradients"] == found["memory"]["table_optimizer"] == 0
    assert found["memory"]["tables"] == (384006168 + 384016682) * 264


def show(capsys: Any, *words: Any) -> tuple[int, str]:
    code = main(["show", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out if code == 0 else out.err


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    file = save(small(), tmp_path / "config.json")
    code, text = show(
        capsys, file, "--chip", "h100", "--mesh", "data=-1,table=2", "--chips", "16"
    )
    assert code == 0
    assert "16 x NVIDIA H100 SXM: data = 8, fsdp = 1, tensor = 1, table = 2" in text
    assert "fits: the chip has 80.0 GB" in text and "bound by" in text
    code, text = show(capsys, file, "--chip", "h100", "--mesh", "data=8", "--json")
    plain = json.loads(text)
    assert plain["plan"]["chips"] == 8 and plain["config"]["mesh"]["data"] == 8
    assert plain["plan"]["mesh"]["table"] == 1
    code, text = show(capsys, file, "--chip", "h100", "--mesh.table", "2", "--chips=8")
    assert code == 0 and "table = 2" in text
    code, text = show(capsys, file, "--json")
    assert "plan" not in json.loads(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chips", "8"], "--chips needs --chip"),
        (["--mesh", "data=8"], "--mesh needs --chip"),
        (["--chip", "b200", "--chips", "8"], "one of ['h100', 'h200', 'v5p', 'v6e']"),
        (["--chip", "h100"], "chips"),
        (["--chip", "h100", "--chips", "0"], "at least 1"),
        (["--chip", "h100", "--mesh", "data"], "fields such as data=16,table=8"),
        (["--chip", "h100", "--mesh", "dat=4", "--chips", "4"], "mesh.dat"),
        (
            ["--chip", "h100", "--mesh", "table=3", "--chips", "8"],
            "not a multiple of 3",
        ),
        (["--chip", "h100", "--mesh", "data=4", "--chips", "8"], "product of 8"),
        (["--chip", "h100", "--mesh", "data=128"], "data.batch_size"),
    ],
)
def test_errors_name_what_is_wrong(
    words: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    file = save(small(), tmp_path / "config.json")
    code, text = show(capsys, file, *words)
    assert code != 0 and said in text and text.count("\n") == 1


def test_a_plan_touches_no_device(tmp_path: Path) -> None:
    experiment = small(MeshConfig(data=2, table=4))
    # Optimizers that work entry by entry are tried out on a few numbers.
    optim = replace(experiment.optim, table_optimizer="sinkhorn_momentum")
    file = save(replace(experiment, optim=optim), tmp_path / "config.json")
    program = (
        "from memjax.cli.main import main\n"
        f"assert main(['show', {str(file)!r}, '--chip', 'v5p']) == 0\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)


def test_unknown_chips_are_refused_before_anything_else() -> None:
    with pytest.raises(ConfigError, match="chip"):
        plan(small(), "tpu", 3)
