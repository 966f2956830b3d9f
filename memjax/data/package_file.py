"""Data files that lie inside installed packages.

What: find such a file without importing its package, and check its hash.
Why: corpora and vocabularies come with `pip install`; nothing is downloaded later.
When not: a user's own files are read by `memjax.data.text`.
"""

import hashlib
from importlib import metadata
from pathlib import Path

from memjax.errors import DataError, MissingExtraError


def locate_package_file(package: str, relative: str, extra: str) -> Path:
    """Path of the file `relative` (to site-packages) of an installed distribution.

    Raises:
        MissingExtraError: the distribution is not installed; names `extra`.
        DataError: it is installed, but without this file.
    """
    try:
        found = metadata.distribution(package).locate_file(relative)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(package, extra) from None
    path = Path(str(found))
    if not path.is_file():
        raise DataError(
            f"{package} is installed without {relative}: "
            f"pip install --force-reinstall 'memjax[{extra}]' brings the right release"
        )
    return path


def check_hash(what: str, content: bytes, wanted: str) -> None:
    """DataError naming `what` and both hashes unless sha256(content) is `wanted`."""
    got = hashlib.sha256(content).hexdigest()
    if got != wanted:
        raise DataError(f"{what} has sha256 {got}, wanted {wanted}")


def read_package_file(package: str, relative: str, sha256: str, *, extra: str) -> bytes:
    """Content of a package's file after its hash was checked.

    Raises:
        MissingExtraError: the package is not installed.
        DataError: the file is missing or has another hash.
    """
    content = locate_package_file(package, relative, extra).read_bytes()
    check_hash(f"{relative} of {package}", content, sha256)
    return content
