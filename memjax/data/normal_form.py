"""The normal form of a token's text, by which tokens are put into classes.

What: `normalize`, without accents, case and outer white space.
Why: "Hello", "HELLO" and " hello" should be one token to an n-gram table, and the
    published tables were addressed by exactly this rule.
When not: text for a model to read; nothing here can be undone.
"""

import re
import unicodedata

# What has the Unicode property White_Space; str.strip() would also take U+001C to
# U+001F away.
_WHITE_SPACE = (
    "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
_RUN_OF_SPACE = re.compile(r"[ \t\r\n]+")
# Stands for the one space that must outlive stripping.
_SPACE = "\ue000"


def normalize(text: str) -> str:
    """The normal form of a text; may be empty.

    In this order: NFKC; NFD; marks (all general categories M) removed; lower case, each
    character for itself (no final sigma); each run of space, tab, carriage return and
    line feed becomes one space; Unicode white space stripped from both ends, unless the
    whole text is one space, which stays. A character U+E000 becomes a space.

    Cost: some microseconds a token.
    Source: the normaliser of deepseek-ai/Engram engram_demo_v1.py (CompressedTokenizer)
    and DeepSeek-V4.1-Flash inference/engram.py, two equal lists of steps of the
    `tokenizers` library. Differs: Unicode tables are those of Python, so characters
    younger than either of the two may differ.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    kept = (c for c in text if not unicodedata.category(c).startswith("M"))
    text = _RUN_OF_SPACE.sub(" ", "".join(c.lower() for c in kept))
    text = _SPACE if text == " " else text.strip(_WHITE_SPACE)
    return text.replace(_SPACE, " ")


def class_key(text: str, name: str) -> str:
    """What two tokens must share to be one class.

    Args:
        text: the token decoded alone.
        name: how the vocabulary writes the token.

    Returns:
        `name` where `text` holds U+FFFD, i.e. where the token is not whole UTF-8; else
        the normal form of `text`, or `text` itself where that is empty.
    """
    if "\ufffd" in text:
        return name
    return normalize(text) or text
