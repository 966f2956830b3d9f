"""106 English Wikipedia articles as wikitext.

What: the articles of a shortened dump inside gensim, 5.7 MB, the kind of enwik8.
Why: the only part whose bits per byte compare with the literature on enwik8.
When not: the raw XML (user names, time stamps, hashes) is never used.
"""

import bz2
from collections.abc import Iterator
from xml.etree import ElementTree

from memjax.data.package_file import read_package_file
from memjax.data.recipe import CorpusRecipe


def _units() -> Iterator[bytes]:
    packed = read_package_file(
        "gensim",
        "gensim/test/test_data/"
        "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
        extra="corpora",
    )
    root = ElementTree.fromstring(bz2.decompress(packed))
    space = root.tag[: root.tag.index("}") + 1]
    for page in root.iter(space + "page"):
        if page.findtext(space + "ns") != "0":
            continue
        if page.find(space + "redirect") is not None:
            continue
        title = page.findtext(space + "title")
        text = page.findtext(f"{space}revision/{space}text") or ""
        yield f"= {title} =\n{text.strip()}\n\n".encode()


RECIPE = CorpusRecipe(
    name="wikiart",
    title="English Wikipedia, 106 articles",
    licence="text CC BY-SA, package LGPL-2.1",
    extra="corpora",
    units=_units,
    cycle=10,
    text_sha256="54a1b840b1eea7d4b57bb30597d3634507da72b649e4f58f93f535dc2cc7f79c",
    split_sha256={
        "valid": "c7066de1a6e540f70ca3bc706a27ce14e0444fe8572e87a30b9c772a5587b82e",
        "test": "9eded3681c26fb5a5ee022cddd3447a4d65be54e43d98167385b2bf5ba546488",
    },
    split_bytes={"train": 4776404, "valid": 469028, "test": 504008},
)
