"""The experiment: joins between parts, JSON round trip, hash, files, shrinking."""

import json
from dataclasses import replace

import pytest

from memjax.data.config import CorpusConfig, DataConfig
from memjax.errors import ConfigError, DataError, MemjaxError
from memjax.experiment import (
    Experiment,
    config_hash,
    diff,
    from_dict,
    load_experiment,
    override,
    save,
    shrink,
    to_dict,
)
from memjax.layers.engram import EngramConfig
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.parallel.mesh import MeshConfig
from memjax.train.config import TrainConfig

EXPERIMENT = Experiment(
    name="small",
    model=ModelConfig(
        n_layers=6,
        memories=(
            EngramConfig(layers=(1, 4), rows_per_head=(100, 200)),
            EngramConfig(layers=(2,), form="v41"),
        ),
    ),
    data=DataConfig(corpora=(CorpusConfig(name="kjv", weight=2.0),)),
    seed=3,
)

FILE = """
from memjax.experiment import Experiment, axis, product
from memjax.models.config import ModelConfig

def config(scale):
    widths = {"laptop": 64, "gpu": 256, "pod": 512}
    return Experiment(name="filed", model=ModelConfig(d_model=widths[scale]))

def sweep():
    return product(axis("optim.learning_rate", 1e-3, 2e-3), axis("seed", 0, 1))

published = {"bpb": 1.5}
"""


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data.batch_size": 6, "train.accumulate_steps": 4}, "train.accumulate_steps"),
        ({"mesh.data": 3, "data.batch_size": 8}, "data.batch_size"),
        ({"mesh.data": 3, "data.batch_size": 9}, "data.eval_batch_size"),
        ({"model.vocab_size": 300}, "model.vocab_size"),
    ],
)
def test_joins_name_the_field(changes, field):
    with pytest.raises(ConfigError) as caught:
        override(EXPERIMENT, changes.items()).validate()
    assert caught.value.field == field


def test_joins_with_a_number_of_devices():
    assert EXPERIMENT.validate(n_devices=8) is EXPERIMENT
    with pytest.raises(ConfigError, match=r"data\.batch_size = 8.*= 3"):
        EXPERIMENT.validate(n_devices=3)
    fixed = replace(EXPERIMENT, mesh=MeshConfig(data=2))
    with pytest.raises(ConfigError, match=r"^mesh"):
        fixed.validate(n_devices=8)


def test_a_wrong_type_set_in_code_is_found():
    model = replace(EXPERIMENT.model, remat=2.5)
    with pytest.raises(ConfigError, match=r"^model\.remat = 2\.5.*true or false"):
        replace(EXPERIMENT, model=model).validate()


@pytest.mark.parametrize(
    ("field", "value"), [("name", "a/b"), ("name", ""), ("seed", -1), ("seed", 2**31)]
)
def test_fields_of_the_experiment_itself(field, value):
    with pytest.raises(ConfigError) as caught:
        replace(EXPERIMENT, **{field: value})
    assert caught.value.field == field


def test_json_round_trip_and_kind_tags(tmp_path):
    path = save(EXPERIMENT, tmp_path / "deep" / "config.json")
    plain = json.loads(path.read_text())
    assert plain["model"]["memories"][0]["kind"] == "engram"
    assert from_dict(Experiment, plain) == EXPERIMENT
    assert load_experiment(path).experiment == EXPERIMENT
    assert load_experiment(path.parent).experiment == EXPERIMENT
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["model"].update(d_modle=3), r"model\.d_modle = 3.*model\.d_model"),
        (lambda p: p["model"].update(d_model=3.5), r"model\.d_model = 3\.5"),
        (
            lambda p: p["model"]["memories"][0].update(kind="x"),
            r"memories\.0\.kind = 'x'",
        ),
        (lambda p: p.pop("name"), r"^name = None.*missing"),
        (
            lambda p: p["optim"].update(betas=[0.9]),
            r"optim\.betas = \[0\.9\].*exactly 2",
        ),
    ],
)
def test_damaged_saved_configs_are_refused(change, message):
    plain = to_dict(EXPERIMENT)
    change(plain)
    with pytest.raises(ConfigError, match=message):
        from_dict(Experiment, plain)


def test_fields_a_saved_config_lacks_keep_their_default():
    plain = to_dict(EXPERIMENT)
    del plain["train"], plain["model"]["rope_theta"]
    assert from_dict(Experiment, plain) == EXPERIMENT


def test_hash_follows_every_field_but_the_names():
    base = config_hash(EXPERIMENT)
    assert config_hash(replace(EXPERIMENT, name="other", notes="x")) == base
    changes = {
        "seed": 4,
        "model.memories.1.hash_seed": 1,
        "optim.sinkhorn.tau": 0.5,
        "data.seed": 9,
    }
    others = {config_hash(override(EXPERIMENT, [item])) for item in changes.items()}
    assert len(others | {base}) == 5


def test_diff_is_dotted_and_covers_added_parts():
    other = override(EXPERIMENT, [("seed", 4), ("model.memories", ())])
    changes = {change.path: change for change in diff(EXPERIMENT, other)}
    assert str(changes["seed"]) == "seed: 3 -> 4"
    assert changes["model.memories.1.form"].before == "v41"
    assert changes["model.memories.1.form"].after is None
    assert diff(EXPERIMENT, EXPERIMENT) == []


def test_python_file_with_scale_and_sweep(tmp_path):
    path = tmp_path / "filed.py"
    path.write_text(FILE)
    loaded = load_experiment(path)
    assert loaded.experiment.model.d_model == 64
    assert load_experiment(path, scale="gpu").experiment.model.d_model == 256
    assert len(loaded.sweep.cells) == 4 and loaded.published == {"bpb": 1.5}
    path.write_text(FILE.replace('"laptop": 64', '"laptop": 32'))
    assert load_experiment(path).experiment.model.d_model == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"FILE = .*defines config\(\)"),
        ("def config():\n    return 3\n", r"config\(\) = 3"),
        ("def config():\n    return 1 / 0\n", r"bad\.py, line 2: ZeroDivisionError"),
        ("def config(:\n", r"bad\.py, line 1: SyntaxError"),
        ("import no_such_module\n", r"bad\.py, line 1: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)\n", r"bad\.py, line 2: SystemExit: 3"),
    ],
)
def test_broken_files_are_one_line(tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(MemjaxError, match=message) as caught:
        load_experiment(path)
    assert "\n" not in str(caught.value)


def test_missing_files_scales_and_torn_configs(tmp_path):
    with pytest.raises(ConfigError, match=r"FILE = .*nowhere\.py.*run folder"):
        load_experiment(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError, match="scale = 'huge'.*laptop, gpu, pod"):
        load_experiment(tmp_path, scale="huge")
    path = save(EXPERIMENT, tmp_path / "config.json")
    with pytest.raises(ConfigError, match="scale = 'gpu'"):
        load_experiment(path, scale="gpu")
    path.write_text('{"name": "torn')
    with pytest.raises(DataError, match=r"config\.json is no saved config"):
        load_experiment(path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.window": 128, "model.n_kv_heads": 1, "train.accumulate_steps": 4},
        {"mesh.data": 4, "train.profile_steps": (100, 200), "optim.warmup_steps": 50},
    ],
)
def test_shrink_keeps_the_structure(changes):
    experiment = override(EXPERIMENT, changes.items())
    small = shrink(experiment)
    assert small.train.n_steps <= 6 and small.model.d_model == 32
    assert [m.form for m in small.model.memories] == ["demo", "v41"]
    assert [m.layers for m in small.model.memories] == [(0, 2), (1,)]
    assert small.model.memories[0].rows_per_head == (64, 64)
    assert small.optim.learning_rate == experiment.optim.learning_rate
    assert small.data.corpora == experiment.data.corpora
    assert shrink(small) == small


def test_shrink_keeps_what_must_fit_together():
    """Sign-pattern keys, widths of the stream, targets inside a chunk."""
    memories = (
        ProductKeyConfig(
            layers=(0,), flat=True, key_init="binary", n_sub_keys=1024, key_width=10
        ),
        ProductKeyConfig(
            layers=(1,), query="identity", key_width=128, value_width=128, k=3
        ),
        FastWeightConfig(layers=(2,), chunk=64, lookahead=40),
    )
    model = ModelConfig(n_layers=3, d_model=128, memories=memories)
    small = shrink(Experiment(name="s", model=model)).model.memories
    assert (small[0].n_sub_keys, small[0].key_width) == (256, 8)
    assert (small[1].key_width, small[1].value_width) == (32, 32)
    assert small[2].lookahead < small[2].chunk
    with pytest.raises(ConfigError, match="memories.lookahead = 8"):
        replace(memories[2], chunk=8, lookahead=8)


@pytest.mark.parametrize("table_by", ["rows", "columns", "hash_columns"])
def test_shrink_leaves_parts_for_the_mesh(table_by):
    mesh = MeshConfig(data=1, tensor=4, table=16, table_by=table_by)
    memory = EngramConfig(n_heads=8, row_width=32, table_mode="rows")
    model = ModelConfig(n_heads=8, n_kv_heads=4, memories=(memory,))
    small = shrink(Experiment(name="m", model=model, mesh=mesh))
    assert small.validate(64).mesh == mesh


def test_shrink_moves_the_memory_of_the_probability_arrangement():
    model = ModelConfig(
        n_layers=4, memories=(EngramConfig(layers=(4,)),), arrangement="probability"
    )
    small = shrink(Experiment(name="p", model=model, train=TrainConfig(n_steps=9)))
    assert small.model.memories[0].layers == (small.model.n_layers,)


def test_a_table_axis_needs_tables_that_can_be_divided():
    rows = EngramConfig(table_mode="rows", row_width=6)
    base = Experiment(name="x", mesh=MeshConfig(data=1, table=4))
    with pytest.raises(ConfigError, match="mesh.table = 4.*table_mode 'rows'"):
        base.validate(4)
    with_rows = replace(base, model=ModelConfig(memories=(rows,)))
    with_rows.validate(4)
    columns = replace(base.mesh, table=-1, table_by="columns")
    with pytest.raises(ConfigError, match=r"model.memories.0.row_width = 6.*4 parts"):
        replace(with_rows, mesh=columns).validate(4)
    with pytest.raises(ConfigError, match="mesh.table_by = 'blocks'"):
        MeshConfig(table_by="blocks")
