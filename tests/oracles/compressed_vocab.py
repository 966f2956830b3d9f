"""Classes of a vocabulary by their definition: all earlier ids searched for each id."""

import re
import unicodedata

SPACES = {0x20, 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
SPACES |= set(range(0x09, 0x0E)) | set(range(0x2000, 0x200B))


def normal_form(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    kept = []
    for character in text:
        if unicodedata.category(character) not in ("Mn", "Mc", "Me"):
            kept.extend(character.lower())
    text = re.sub("( |\t|\r|\n)+", " ", "".join(kept))
    if text != " ":
        while text and ord(text[0]) in SPACES:
            text = text[1:]
        while text and ord(text[-1]) in SPACES:
            text = text[:-1]
    return text.replace("\ue000", " ")


def classes(texts: list[str], names: list[str]) -> list[int]:
    keys, found = [], []
    for text, name in zip(texts, names, strict=True):
        key = name if "\ufffd" in text else normal_form(text)
        key = key if key != "" else text
        if key in keys:
            found.append(found[keys.index(key)])
        else:
            found.append(max(found, default=-1) + 1)
        keys.append(key)
    return found
