"""Memory layers for language models in JAX: study, train and measure them.

What: the public names, each imported from its module when it is first used.
Why: `import memjax` costs nothing, and a notebook needs one import.
When not: everything else; import modules directly, `from memjax.ops import gates`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memjax.data.compressed_vocab import CompressedVocab, load_classes
    from memjax.data.config import CorpusConfig, DataConfig
    from memjax.errors import ConfigError, MemjaxError
    from memjax.evaluate.usage import UsageCounter
    from memjax.experiment import Experiment, load_experiment
    from memjax.layers.block import HyperConfig
    from memjax.layers.byte_engram import ByteEngramConfig
    from memjax.layers.cross_attention import CedConfig
    from memjax.layers.engram import Engram, EngramConfig
    from memjax.layers.experts import ExpertsConfig
    from memjax.layers.fast_weight import FastWeightMemory
    from memjax.layers.fast_weight_config import FastWeightConfig
    from memjax.layers.hot_engram import HotEngram, HotEngramConfig
    from memjax.layers.memory import MemoryInputs
    from memjax.layers.memory_plus import MemoryPlus, MemoryPlusConfig
    from memjax.layers.ngram_embedding import NgramEmbedding, NgramEmbeddingConfig
    from memjax.layers.ngram_keys import NgramKeys, NgramKeysConfig
    from memjax.layers.peer import Peer, PeerConfig
    from memjax.layers.precision import PrecisionConfig
    from memjax.layers.product_key import ProductKeyMemory
    from memjax.layers.product_key_config import ProductKeyConfig
    from memjax.layers.row_grad import value_and_row_grad
    from memjax.layers.table import Table, ValueTable, declare_table
    from memjax.models.config import ModelConfig
    from memjax.models.decode import decoder, init_cache, reset_rows
    from memjax.models.language_model import LanguageModel
    from memjax.ops.address_entropy import address_entropy
    from memjax.ops.embedding_bag import embedding_bag, gather_rows
    from memjax.ops.fast_weight_documents import fast_weight_documents
    from memjax.ops.fp8 import dequantize_rows, quantize_rows
    from memjax.ops.gates import combine, signed_sqrt_gate
    from memjax.ops.knn import interpolate, knn_log_probs, nearest
    from memjax.ops.look_back import next_history
    from memjax.ops.ngram_hash import host_ngram_rows, ngram_rows
    from memjax.ops.ngram_layout import NgramLayout, ngram_layouts
    from memjax.ops.product_keys import distance_scores, dot_scores, product_key_search
    from memjax.ops.read_weights import read_weights
    from memjax.ops.row_gradient import RowGradient, unique_rows
    from memjax.ops.short_conv import short_conv
    from memjax.ops.sinkhorn import sinkhorn_balance
    from memjax.ops.token_classes import token_classes
    from memjax.optim.build import build_optimizer
    from memjax.optim.config import OptimConfig
    from memjax.optim.row_write import RowWriter
    from memjax.optim.sinkhorn_momentum import (
        scale_by_sinkhorn_momentum,
        sinkhorn_momentum,
    )
    from memjax.optim.sinkhorn_rows import sinkhorn_rows
    from memjax.optim.table_optimizer import TableOptimizer, rowwise
    from memjax.optim.tables import TableGroup, apply_updates, table_optimizer
    from memjax.parallel.mesh import MeshConfig
    from memjax.parallel.row_sharding import RowSharding
    from memjax.train.config import TrainConfig

_HOMES = {
    "ByteEngramConfig": "layers.byte_engram",
    "CedConfig": "layers.cross_attention",
    "CompressedVocab": "data.compressed_vocab",
    "ConfigError": "errors",
    "CorpusConfig": "data.config",
    "DataConfig": "data.config",
    "Engram": "layers.engram",
    "EngramConfig": "layers.engram",
    "Experiment": "experiment",
    "ExpertsConfig": "layers.experts",
    "FastWeightConfig": "layers.fast_weight_config",
    "FastWeightMemory": "layers.fast_weight",
    "HotEngram": "layers.hot_engram",
    "HotEngramConfig": "layers.hot_engram",
    "HyperConfig": "layers.block",
    "LanguageModel": "models.language_model",
    "MemjaxError": "errors",
    "MemoryInputs": "layers.memory",
    "MemoryPlus": "layers.memory_plus",
    "MemoryPlusConfig": "layers.memory_plus",
    "MeshConfig": "parallel.mesh",
    "ModelConfig": "models.config",
    "NgramEmbedding": "layers.ngram_embedding",
    "NgramEmbeddingConfig": "layers.ngram_embedding",
    "NgramKeys": "layers.ngram_keys",
    "NgramKeysConfig": "layers.ngram_keys",
    "NgramLayout": "ops.ngram_layout",
    "OptimConfig": "optim.config",
    "Peer": "layers.peer",
    "PeerConfig": "layers.peer",
    "PrecisionConfig": "layers.precision",
    "ProductKeyConfig": "layers.product_key_config",
    "ProductKeyMemory": "layers.product_key",
    "RowGradient": "ops.row_gradient",
    "RowSharding": "parallel.row_sharding",
    "RowWriter": "optim.row_write",
    "Table": "layers.table",
    "TableGroup": "optim.tables",
    "TableOptimizer": "optim.table_optimizer",
    "TrainConfig": "train.config",
    "UsageCounter": "evaluate.usage",
    "ValueTable": "layers.table",
    "address_entropy": "ops.address_entropy",
    "apply_updates": "optim.tables",
    "build_optimizer": "optim.build",
    "combine": "ops.gates",
    "declare_table": "layers.table",
    "decoder": "models.decode",
    "dequantize_rows": "ops.fp8",
    "distance_scores": "ops.product_keys",
    "dot_scores": "ops.product_keys",
    "embedding_bag": "ops.embedding_bag",
    "fast_weight_documents": "ops.fast_weight_documents",
    "gather_rows": "ops.embedding_bag",
    "host_ngram_rows": "ops.ngram_hash",
    "init_cache": "models.decode",
    "interpolate": "ops.knn",
    "knn_log_probs": "ops.knn",
    "load_classes": "data.compressed_vocab",
    "load_experiment": "experiment",
    "nearest": "ops.knn",
    "next_history": "ops.look_back",
    "ngram_layouts": "ops.ngram_layout",
    "ngram_rows": "ops.ngram_hash",
    "product_key_search": "ops.product_keys",
    "quantize_rows": "ops.fp8",
    "read_weights": "ops.read_weights",
    "reset_rows": "models.decode",
    "rowwise": "optim.table_optimizer",
    "scale_by_sinkhorn_momentum": "optim.sinkhorn_momentum",
    "short_conv": "ops.short_conv",
    "signed_sqrt_gate": "ops.gates",
    "sinkhorn_balance": "ops.sinkhorn",
    "sinkhorn_momentum": "optim.sinkhorn_momentum",
    "sinkhorn_rows": "optim.sinkhorn_rows",
    "table_optimizer": "optim.tables",
    "token_classes": "ops.token_classes",
    "unique_rows": "ops.row_gradient",
    "value_and_row_grad": "layers.row_grad",
}

__all__ = [
    "ByteEngramConfig",
    "CedConfig",
    "CompressedVocab",
    "ConfigError",
    "CorpusConfig",
    "DataConfig",
    "Engram",
    "EngramConfig",
    "Experiment",
    "ExpertsConfig",
    "FastWeightConfig",
    "FastWeightMemory",
    "HotEngram",
    "HotEngramConfig",
    "HyperConfig",
    "LanguageModel",
    "MemjaxError",
    "MemoryInputs",
    "MemoryPlus",
    "MemoryPlusConfig",
    "MeshConfig",
    "ModelConfig",
    "NgramEmbedding",
    "NgramEmbeddingConfig",
    "NgramKeys",
    "NgramKeysConfig",
    "NgramLayout",
    "OptimConfig",
    "Peer",
    "PeerConfig",
    "PrecisionConfig",
    "ProductKeyConfig",
    "ProductKeyMemory",
    "RowGradient",
    "RowSharding",
    "RowWriter",
    "Table",
    "TableGroup",
    "TableOptimizer",
    "TrainConfig",
    "UsageCounter",
    "ValueTable",
    "address_entropy",
    "apply_updates",
    "build_optimizer",
    "combine",
    "declare_table",
    "decoder",
    "dequantize_rows",
    "distance_scores",
    "dot_scores",
    "embedding_bag",
    "fast_weight_documents",
    "gather_rows",
    "host_ngram_rows",
    "init_cache",
    "interpolate",
    "knn_log_probs",
    "load_classes",
    "load_experiment",
    "nearest",
    "next_history",
    "ngram_layouts",
    "ngram_rows",
    "product_key_search",
    "quantize_rows",
    "read_weights",
    "reset_rows",
    "rowwise",
    "scale_by_sinkhorn_momentum",
    "short_conv",
    "signed_sqrt_gate",
    "sinkhorn_balance",
    "sinkhorn_momentum",
    "sinkhorn_rows",
    "table_optimizer",
    "token_classes",
    "unique_rows",
    "value_and_row_grad",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562), and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'memjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memjax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
