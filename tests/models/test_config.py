"""Values of the model's config that only code can give it.

What: lists for tuples, texts for numbers, NaN; and sizes that only a layout refuses.
Why: each is one line that names the field, where python would show a traceback later.
When not: what each field does to the output; `test_fields` has that.
"""

import pytest

from memjax.errors import ConfigError
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.models.layouts import layouts

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ModelConfig(d_model="128"), "model.d_model"),
        (lambda: ModelConfig(n_layers=2.0), "model.n_layers"),
        (lambda: ModelConfig(rope_theta=NAN), "model.rope_theta"),
        (lambda: ModelConfig(norm_eps=NAN), "model.norm_eps"),
        (lambda: ModelConfig(memories=EngramConfig()), "model.memories"),
        (lambda: ModelConfig(memories=[EngramConfig()]), "model.memories"),
        (lambda: EngramConfig(layers=1), "memories.layers"),
        (lambda: EngramConfig(layers=[1]), "memories.layers"),
        (lambda: EngramConfig(orders=2), "memories.orders"),
        (lambda: EngramConfig(orders=[2, 3]), "memories.orders"),
        (lambda: EngramConfig(rows_per_head=[8, 8]), "memories.rows_per_head"),
        (lambda: EngramConfig(rows_per_head=1.5), "memories.rows_per_head"),
        (lambda: EngramConfig(n_heads="8"), "memories.n_heads"),
        (lambda: EngramConfig(table_std=NAN), "memories.table_std"),
    ],
)
def test_wrong_types_name_the_field(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"orders": (0, 1)}, "orders"),
        ({"hash_seed": -1}, "hash_seed"),
        ({"rows_per_head": 0}, "rows_per_head"),
        ({"rows_per_head": 2**31 - 2}, "rows_per_head"),
    ],
)
def test_what_the_layout_refuses_names_the_field_of_the_config(changes, field):
    memories = (EngramConfig(layers=(0,)), EngramConfig(layers=(1,), **changes))
    with pytest.raises(ConfigError) as caught:
        layouts(ModelConfig(memories=memories))
    assert caught.value.field == f"model.memories.1.{field}"
