"""Words of a command line that are no overrides, and the overrides that are probably meant by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_PAIRS = {"[": "]", "{": "}", "(": ")"}
# A key with its block, such as algorithm.gamma
_PATH = re.compile(r"[a-z_]\w*(\.\w+)+")


class Meant(NamedTuple):
    """What is meant by a wrong word.

    `error`: name of the error text. `facts`: values for this text.
    """

    error: str
    facts: Mapping[str, str]


def meant_by(
    word: str, words: Sequence[str], parses: Callable[[str], bool]
) -> Meant | None:
    """Return what is meant by a word that is no override; None if it is not clear.

    `words`: all words of the command line. `parses`: whether a text is a valid override.
    """
    key, equals, value = word.partition("=")
    if not equals:
        return _of_several_words(word, words)
    # As in a comparison: key==value
    if value.startswith("="):
        plain = value.lstrip("=")
        return Meant("pair", {"name": key, "value": plain}) if plain else None
    several = _several_places(key, value)
    if several is not None and all(map(parses, several)):
        return Meant("several-overrides", {"value": " ".join(several)})
    # A comma behind it, as in Python: gamma=0.98,
    if value.endswith(",") and parses(word[:-1]):
        return Meant("comma-behind", {"plain": word[:-1]})
    # Blanks around the sign in one word: 'gamma = 0.98'
    if key != key.strip() and parses(f"{key.strip()}={value.strip()}"):
        return Meant("pair", {"name": key.strip(), "value": value.strip()})
    # A list in round brackets: (64,64)
    numbers = re.fullmatch(r"\(([^()\[\]{}]*)\)", value)
    if numbers is not None and parses(f"{key}=[{numbers[1]}]"):
        return Meant("pair", {"name": key, "value": f"[{numbers[1].rstrip(',')}]"})
    # Other signs between the items of a list: [64;64]
    if re.fullmatch(r"\[[\w.+-]+(?:\s*[;|]\s*[\w.+-]+)+\]", value):
        commas = re.sub(r"\s*[;|]\s*", ",", value)
        if parses(f"{key}={commas}"):
            return Meant("pair", {"name": key, "value": commas})
    # A word before a list of numbers: gpu[0-3], cuda:[0,1]
    named = re.fullmatch(
        r"(?:gpus?|cuda|npus?|devices?|list|tuple)[: ]?[(\[]+([0-9][0-9, -]*?),?[)\]]+",
        value,
    )
    if named is not None and parses(f"{key}=[{named[1]}]"):
        return Meant("pair", {"name": key, "value": f"[{named[1]}]"})
    # More of a list: sinks+=[wandb]
    if key.endswith("+"):
        items = value.strip("[]")
        return Meant("more-of-list", {"name": key[:-1], "value": items})
    # Other signs between keys, and between key and value: a->b, a::b, gamma:=0.98
    path = re.sub("->|::", ".", key).removesuffix(":")
    if path != key and _PATH.fullmatch(path):
        return Meant("pair", {"name": path, "value": value})
    # A sign behind it, as in a program
    if value.endswith(";") and parses(word[:-1]):
        return Meant("comma-behind", {"plain": word[:-1]})
    # Keys in brackets: algorithm[gamma]
    if re.fullmatch(r"\w+(\[['\"]?\w+['\"]?\])+", key):
        path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", key)
        return Meant("pair", {"name": path, "value": value})
    closed = _closed(word)
    if closed != word and parses(closed):
        return Meant("not-closed-word", {"closed": closed})
    # {"a"=1} and {'a': 1} have another form than {a: 1}
    plain_keys = re.sub(r"([{,]\s*)['\"]?(\w+)['\"]?\s*[=:]\s*", r"\1\2: ", value)
    colons = f"{key}={plain_keys}"
    if value.startswith("{") and parses(colons):
        return Meant("colons-in-braces", {"colons": colons})
    return None


def _several_places(key: str, value: str) -> list[str] | None:
    """Return the overrides for several components that are meant by one word; None for another word.

    Such words are `component_placement.actor=0-7,env=0-3`, and `component_placement.env,rollout=0-3`.
    """
    block, dot, name = key.rpartition(".")
    if not dot or re.search(r"[\[\]{}'\"]", value):
        return None
    # Several keys with the same value
    if re.fullmatch(r"\w+(,\w+)+", name):
        return [f"{block}.{one}={value}" for one in name.split(",")]
    # Further keys of the same block behind commas
    words = re.split(r",(?=\w+=)", f"{name}={value}")
    if len(words) < 2:
        return None
    return [f"{block}.{word}" for word in words]


def _of_several_words(word: str, words: Sequence[str]) -> Meant | None:
    """Return what is meant by a word without `=`, and the words beside it; None if it is not clear."""
    at = words.index(word) if word in words else 0
    before = words[at - 1] if at else ""
    after = words[at + 1] if at + 1 < len(words) else ""
    # A range with blanks: 0 - 3
    if word == "-" and re.search(r"=[0-9,-]*[0-9]$", before) and after[:1].isdigit():
        return Meant("split", {"joined": f"{before}-{after}"})
    # A value behind a blank: gamma= 0.98
    if before.endswith("=") and "=" not in word:
        return Meant("pair", {"name": before[:-1], "value": word})
    # Text with blanks: env.system=You are helpful
    if "=" in before and not _PATH.fullmatch(word) and word[:1].isalpha():
        text = [before]
        for each in words[at:]:
            if "=" in each or each.startswith("-"):
                break
            text.append(each)
        return Meant("split", {"joined": " ".join(text)})
    # A key and its value, with a blank between them
    if _PATH.fullmatch(word) and after and "=" not in after and after[0] != "-":
        return Meant("pair", {"name": word, "value": after})
    return None


def _closed(word: str) -> str:
    """Return a word with the quotes, brackets and braces closed that it leaves open."""
    open_ones: list[str] = []
    inside = ""
    for letter in word:
        if inside:
            if letter == inside:
                inside = ""
        elif letter in "'\"":
            inside = letter
        elif letter in _PAIRS:
            open_ones.append(_PAIRS[letter])
        elif open_ones and letter == open_ones[-1]:
            open_ones.pop()
    return word + inside + "".join(reversed(open_ones))
