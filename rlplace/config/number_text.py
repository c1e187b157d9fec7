"""Numbers in texts of a config that YAML does not read as numbers: `3e-4`, `16k`, `1_000_000`, `2**14`, `10min`."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from rlplace.config.yaml_text import show

_SECONDS: dict[str, float] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?"
_OPERATORS = re.compile(r"\s*(\*\*|\^|\*|/)\s*", re.IGNORECASE)
_MOST_POWER = 60  # the result stays a number that a config may have
# Parts of the names of keys whose values are usually powers of two
_BINARY = re.compile(
    r"token|length|sequence|batch|num_envs|rollout_steps|^prompts$|budget"
)
_COUNTED = "iteration|token|step|env|environment|episode|sample|prompt|epoch|gpu|node|sequence|checkpoint"
_UNITS = {"k": 1, "m": 2}
_UP_TO_TEN = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
_WORDS = {
    "zero": 0,
    **{word: number for number, word in enumerate(_UP_TO_TEN, start=1)},
    "twelve": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
}


class Meant(NamedTuple):
    """What a text means as a number.

    `number`: the number, in the spelling of YAML. `other`: a second meaning; None: there is one meaning.
    """

    number: str
    other: str | None = None


def as_number(text: str, of: object) -> str | None:
    """Return the number that is meant by a text, in the spelling of YAML; None if the text does not mean a number.

    For example, YAML 1.1 reads `3e-4` as a text; the result is `3.0e-4`. `of`: type of the number, int or float.
    """
    # A remark or a comma behind it, as in Python; a remark in brackets
    text = re.sub(r"\s*(?:#|//).*$", "", text)
    text = re.sub(r"(?<=[0-9])\s*\([^()]*\)$", "", text)
    text = text.strip().removesuffix(",").removesuffix(";").strip()
    # A sign in front of it: `~0.2`, `=64`, and `:8000` of a port
    text = re.sub(r"^(?:~|≈|==?|:)\s*(?=[0-9.])", "", text)
    # What is counted: `100 iterations`, `8gpus`
    text = re.sub(rf"(?<=[0-9])\s*(?:{_COUNTED})s?$", "", text, flags=re.IGNORECASE)
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return str(int(text))
    # In words, or with a product behind it: five, 8xA100
    word = _WORDS.get(text.lower())
    if word is not None:
        return str(word)
    counted = re.fullmatch(r"([1-9][0-9]*) ?x ?[a-z][\w-]*", text, re.IGNORECASE)
    if of is int and counted is not None:
        return counted[1]
    # Underscores between digits, as in Python
    if re.fullmatch(r"[1-9][0-9]*(_[0-9]+)+", text):
        return text.replace("_", "")
    # The suffix of a float in C
    text = re.sub(r"(?<=[0-9])f$", "", text)
    # Commas or blanks between thousands, or a comma in place of the decimal point
    if re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+|[1-9][0-9]{0,2}( [0-9]{3})+", text):
        return re.sub("[, ]", "", text)
    if of is float and re.fullmatch(r"0,[0-9]+", text):
        return text.replace(",", ".")
    if of is float and (percent := re.fullmatch(r"([0-9]{1,2})\s*%", text)):
        return show(int(percent[1]) / 100)
    return _computed(text, of) or _spelt(text, of)


def _spelt(text: str, of: object) -> str | None:
    """Return a number with a point or an exponent in the spelling of YAML; None if a text is none of the type `of`."""
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if of is int:
        return str(int(number)) if number.is_integer() else None
    mantissa, exponent, power = text.lower().partition("e")
    if exponent:
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
        return f"{mantissa}e{power}"
    return text


def _computed(text: str, of: object) -> str | None:
    """Return the result of products, quotients and powers, such as `2**14` or `3*1e-4`; None for another text.

    `of`: type of the result, int or float.
    """
    parts = _OPERATORS.split(text.lower())
    if len(parts) < 3 or not all(re.fullmatch(_NUMBER, part) for part in parts[::2]):
        return None
    # Powers bind first
    values = [float(parts[0])]
    signs: list[str] = []
    for sign, part in zip(parts[1::2], parts[2::2], strict=True):
        number = float(part)
        if sign not in ("**", "^"):
            signs.append(sign)
            values.append(number)
            continue
        base = values.pop()
        if abs(number) > _MOST_POWER or base <= 0:
            return None
        values.append(base**number)
    result = values[0]
    for sign, number in zip(signs, values[1:], strict=True):
        if sign == "/" and number == 0:
            return None
        result = result * number if sign == "*" else result / number
    # Without the last digits, which are rounding
    result = float(f"{result:.12g}")
    if not math.isfinite(result):
        return None
    if of is int:
        return str(int(result)) if result.is_integer() else None
    return show(result)


def as_thousands(text: str, name: str) -> Meant | None:
    """Return the whole number that a text such as `16k` or `1M` means; None for another text.

    `name`: name of the key. Where values are usually powers of two, `16k` is 16384, and 16000 is its second meaning.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([km])", text.strip().lower())
    if found is None:
        return None
    number = float(found[1])
    power = _UNITS[found[2]]
    decimal = number * 1000**power
    binary = number * 1024**power
    if not decimal.is_integer():
        return None
    if _BINARY.search(name) and binary.is_integer():
        return Meant(str(int(binary)), str(int(decimal)))
    return Meant(str(int(decimal)))


def as_seconds(text: str, name: str) -> str | None:
    """Return the seconds that a text such as `10min` or `00:10:00` means; None for another text or key.

    `name`: name of the key. Names of durations end with `_s`.
    """
    if not name.endswith("_s"):
        return None
    clock = re.fullmatch(r"\s*([0-9]{1,2}):([0-5][0-9]):([0-5][0-9])\s*", text)
    if clock is not None:
        hours, minutes, seconds = (int(part) for part in clock.groups())
        return str(hours * 3600 + minutes * 60 + seconds)
    # Parts with a unit each: 1.5h, 2h30m, 500 ms
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", text.lower())
    whole = re.fullmatch(r"\s*(?:[0-9]+(?:\.[0-9]+)?\s*[a-z]+\s*)+", text.lower())
    if whole is None or any(unit not in _SECONDS for _, unit in parts):
        return None
    return f"{sum(float(number) * _SECONDS[unit] for number, unit in parts):.12g}"


def as_rate(text: str, name: str) -> str | None:
    """Return the gigabytes per second that a text such as `400Gbps` or `50 GB/s` means; None for another text or key.

    `name`: name of the key. Names of such rates end with `_gb_per_s`.
    """
    found = re.fullmatch(
        r"\s*([0-9]+(?:\.[0-9]+)?)\s*G(?:i?)(b|bit|B)(?:ps|/s|it/s)?\s*", text
    )
    if found is None or not name.endswith("_gb_per_s"):
        return None
    rate = float(found[1]) if found[2] == "B" else float(found[1]) / 8
    return f"{rate:g}"
