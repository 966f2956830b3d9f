"""The most frequent n-grams of a corpus, as an index for a hot tier.

What: `hot_ngrams`: token stores -> `ops.hot_tier.HotIndex`; `cached_hot_file`: the
    same of an experiment, kept in the cache.
Why: which n-grams get a row of their own is decided once, on the training text.
When not: reading the index; see ops.hot_tier.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence

from memjax.data.cache import cache_root
from memjax.data.compressed_vocab import CompressedVocab, load_classes
from memjax.data.config import DataConfig
from memjax.data.document_pieces import document_pieces
from memjax.data.prepared import prepare
from memjax.data.store import TokenStore
from memjax.errors import ConfigError
from memjax.evaluate.ngram_counts import NgramCounts
from memjax.ops.hot_tier import HotIndex
from memjax.ops.token_classes import token_classes


def hot_ngrams(
    stores: Iterable[TokenStore],
    orders: Sequence[int],
    n_hot: int,
    vocab_size: int,
    classes: CompressedVocab | None = None,
) -> HotIndex:
    """The n_hot most frequent n-grams of each order, or all there are.

    By falling count, equal counts by rising key. Only n-grams inside a document count;
    its separator is its first token, as training reads it.

    Args:
        stores: of the training text; read once for each order.
        orders: n-gram lengths.
        n_hot: at least 1.
        vocab_size: V, of the tokens.
        classes: given, n-grams are those of the tokens' classes.

    Raises:
        ConfigError: n_hot below 1, or an order without exact 64-bit keys.

    Cost: that of `NgramCounts`, one order at a time.
    """
    if n_hot < 1:
        raise ConfigError("n_hot", n_hot, "1 or more")
    stores = list(stores)
    n_ids = vocab_size if classes is None else classes.size
    keys = {}
    for order in orders:
        counts = NgramCounts(order, n_ids)
        if not counts.exact:
            raise ConfigError("orders", order, f"orders with {n_ids}^order <= 2^64")
        for store in stores:
            for ids, segments in document_pieces(store):
                if classes is not None:
                    ids = token_classes(classes.table, ids)
                counts.add(ids, segments)
        keys[order] = counts.most_frequent(n_hot)[0]
    return HotIndex(n_ids, keys)


def cached_hot_file(
    data: DataConfig, orders: Sequence[int], n_hot: int, *, classes: bool = False
) -> str:
    """Path of the hot n-grams of an experiment's training text, counted if need be.

    The file lies in the cache beside the corpora, named after text, orders and n_hot,
    so that it is never out of date. Every document counts once, whatever the weight of
    its corpus.

    Args:
        data: of the experiment; corpora that are missing are built.
        orders, n_hot: as in `hot_ngrams`.
        classes: n-grams of the classes of the tokenizer's ids.

    Raises:
        As `data.prepared.prepare` and `hot_ngrams`.
    """
    prepared = prepare(data)
    stores = [prepared.store(part.name, "train") for part in prepared.parts]
    wanted = load_classes(data.tokenizer) if classes else None
    depends = [
        [store.fingerprint for store in stores],
        list(orders),
        n_hot,
        None if wanted is None else wanted.sha256,
    ]
    mark = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:12]
    path = cache_root(data.cache_dir) / f"hot-{mark}.npz"
    if not path.is_file():
        n_ids = prepared.tokenizer.vocab_size
        hot_ngrams(stores, orders, n_hot, n_ids, wanted).save(path)
    return str(path)
