"""One file per corpus; `memjax.data.corpora` lists them."""
