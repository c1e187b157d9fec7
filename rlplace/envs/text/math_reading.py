r"""Reads results of mathematical answers: the last \boxed{}, the number after ####, the last number; and their values.

Every pattern here takes time in proportion to the length of the text, whatever the text is.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from decimal import Context, Decimal

# Longest end of an answer in which a number is searched, and longest result that is read as a number
_READ = 20_000
_LONGEST = 1_000
# Most lines with #### that are tried, from the last one backwards
_MARKED = 20

# ── characters ───────────────────────────────────────────────────────────────────────────────────────────────────────

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_CHARACTERS = {
    # Minus signs and dashes between numbers
    **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011\u2012\u2013", "-"),
    # Long dashes are punctuation
    "\u2014": " ",
    "\u2015": " ",
    # Blanks that may stand within a number
    **dict.fromkeys("\u00a0\u2007\u2009\u202f", "~"),
    # Invisible characters
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    # Outside of dollar signs, math-verify reads only the 5 of 5 \times 10
    **dict.fromkeys("\u00d7\u00b7\u22c5", " * "),
    "\u2044": "/",
    "\u2215": "/",
    "\u221a": r"\sqrt ",
    "\u03c0": r"\pi ",
    "\u00b0": r"^\circ ",
    "\u221e": r"\infty ",
}


def plain_characters(text: str) -> str:
    """Return a text in which signs, blanks, fractions, powers and digits of Unicode are written in ASCII or LaTeX."""
    if text.isascii():
        return text
    return _NOT_ASCII.sub(lambda found: _in_ascii(found[0]), text)


@functools.lru_cache(maxsize=4096)
def _in_ascii(character: str) -> str:
    """Return one character of Unicode in ASCII or LaTeX; unchanged if it is no digit, sign, blank or fraction."""
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.digit(character))
    if category == "Zs":
        return " "
    kind, _, made = unicodedata.decomposition(character).partition(" ")
    written = "".join(chr(int(code, 16)) for code in made.split())
    if kind == "<fraction>":
        return " " + written.replace("\u2044", "/")
    # A raised digit is a power, a lowered one an index
    if kind == "<super>" and written.isdigit():
        return "^" + written
    if kind == "<sub>" and written.isdigit():
        return "_" + written
    if kind == "<wide>" and written.isascii():
        return written
    return character


# ── where the result is ──────────────────────────────────────────────────────────────────────────────────────────────

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# What stands between two boxes of one list
_BETWEEN_BOXES = 60
_LISTED = re.compile(r"(?:[\s,;$]|\\[,;:! ()\[\]]|\\q?quad|\\text|[{}]|and|or)*+")
# Braces that are no part of the text: \{ and \} are
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _braces(text: str) -> dict[int, int]:
    """Return the place of each opening brace that is closed -> the place of its closing brace."""
    pairs = {}
    opened = list[int]()
    # One pass over all braces, however many are never closed
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            pairs[opened.pop()] = brace.start()
    return pairs


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} or \fbox{...}; None without a complete one."""
    boxes = [match.end() - 1 for match in _BOX.finditer(text)]
    if not boxes:
        return None
    pairs = _braces(text)
    for begin in reversed(boxes):
        if begin in pairs:
            return text[begin + 1 : pairs[begin]]
    return None


def has_list_of_boxes(text: str) -> bool:
    r"""Return whether the last two \boxed{...} of a text are parts of one list, such as \boxed{1} and \boxed{2}."""
    boxes = [*_BOX.finditer(text)][-2:]
    if len(boxes) < 2:
        return False
    end = _braces(text).get(boxes[0].end() - 1)
    if end is None:
        return False
    between = text[end + 1 : boxes[1].start()]
    return len(between) <= _BETWEEN_BOXES and bool(_LISTED.fullmatch(between))


# ── the last number of a text ────────────────────────────────────────────────────────────────────────────────────────

_SEPARATOR = r"(?:,|\{,\}|\\[,!]|,\\!|~)"
_DIGITS = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+(?:,\d+)*)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|(?<![\w.])\.\d+)"
# No sign: the dash in 3-4, F-16 and $3$-$4$
_SIGN = r"(?:(?<![\w)\]}%.$])[-+]\\?[$\u20ac\u00a3\u00a5]|(?<![\w)\]}%.])[-+])?"
_EXPONENT = r"(?:[eE][-+]?\d{1,4}(?!\w))?"
_ARGUMENT = r"\s*(?:\{\s*[-+]?[\d.,]+\s*\}|\d)"
_SCIENTIFIC = (
    r"\s*(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)"
)
_NUMBER = (
    rf"{_SIGN}(?:"
    # \frac{3}{4}, 3\frac{1}{2}
    rf"(?:\d{{1,9}}[\s~]*)?\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}"
    # 3 1/2
    rf"|\d{{1,9}}[ ~]+\d{{1,9}}/\d{{1,9}}(?![\d/])"
    # 1,234.50, 1.5e3, 3/4, 1.5 \times 10^3
    rf"|{_DECIMAL}{_EXPONENT}(?:{_SCIENTIFIC}|[ ]?/[ ]?\d+(?!\d))?"
    r")(?:[\s~]{0,3}\\?%)?"
)
# Values that are no plain numbers: \sqrt{2}, 2\pi, x_2, \frac{x}{2}
_SYMBOL = (
    r"\\(?:sqrt|pi|theta|alpha|beta|gamma|lambda|phi|infty|binom|[dtc]?frac|log|ln|sin"
    r"|cos|tan|exp|emptyset|varnothing|overline|bar|dot|lfloor|lceil)(?![A-Za-z])"
)
_TOKEN = re.compile(
    rf"(?P<number>{_NUMBER})"
    r"|(?P<index>(?<![A-Za-z])[A-Za-z]_(?:\{\w{1,20}\}|\w))"
    rf"|(?P<symbol>{_SYMBOL})"
    r"|(?P<command>\\[A-Za-z]+)"
    # CO2, x1, F-16, and the unit cm^2
    r"|(?P<word>[A-Za-z_]\w*+(?:-\d\w*+)*+(?:\^(?:\{\d{1,9}\}|\d))?)"
)
# 2nd, 5-th, 5\\text{th}, and the 3 of 3D
_ORDINAL = re.compile(r"-?(?:\\text\{)?(?:st|nd|rd|th|D)(?![A-Za-z])")
_VARIABLE = re.compile(r"[xyzabceijknpqrtuvw](?![A-Za-z])")
# The base of 101_2 and 5_{7}
_BASE = re.compile(r"_(?=[\d{])")
# Numbers that name something: Step 3, Figure 2; and a modulus
_REFERENCE = re.compile(
    r"(?<![A-Za-z])(?:(?:step|case|question|problem|figure|table|equation|example)[ \t]"
    r"|\\p?mod[ \t]?\{?|\(mod[ \t])$",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"\s{0,3}\^\s{0,3}\{?\s{0,3}\\circ")
_POWER = re.compile(r"\s{0,3}(?:\^|\*\*)\s{0,3}")
_OPERAND = re.compile(r"[-+]?\w+")
# Characters before a number that show of what it is a part
_AROUND = 16
# Tags such as <answer>, and emphasis of Markdown such as **42**
_TAG = re.compile(r"</?[A-Za-z]\w{0,20}>")
_EMPHASIS = re.compile(
    r"""
    (?<![A-Za-z0-9*])
    (\*\*\*?|__)                # opening mark
    (?=[^\s*])
    ([^*\n]{0,200}?[^\s*])      # marked text
    \1                          # closing mark
    (?![A-Za-z0-9*])
    """,
    re.VERBOSE,
)
# A plain number between marks
_ALONE = r"[-+]?\\?\$?\d[\d,.]{0,40}(?:/\d{1,20})?\\?%?"
# A plain number without a comma, since (3,4) and (1,200) are pairs
_SINGLE = r"[-+]?\\?\$?\d{1,40}(?:\.\d{1,40})?(?:/\d{1,20})?\\?%?"
# *42* and _42_, `42`, "42"
_EMPHASIZED_NUMBER = re.compile(rf"(?<![\w*])([*_])({_ALONE})\1(?![\w*])")
_SOME_MARK = re.compile(r"[*_`\"'\u201c\u2018\u00ab]")
_QUOTED_NUMBER = re.compile(
    rf"(?<![\w`])([`\"'])({_ALONE})\1(?![\w`])"
    rf"|[\u201c\u2018\u00ab]({_ALONE})[\u201d\u2019\u00bb]"
)
# Lines that Markdown quotes: > 42
_QUOTE = re.compile(r"^[ \t]{0,3}>[ \t]{1,3}(?=\S)", re.MULTILINE)
# An arrow such as => is no inequality
_INEQUALITY = re.compile(
    r"""
    (?<![-=])
    (?:
        [<>\u2264\u2265\u2260]=?            # <, >=, U+2264
      | !=
      | \\(?:leq?|geq?|neq?|lt|gt)          # \leq
    )
    [\s{$]{0,3}$
    """,
    re.VERBOSE,
)
# Text before a number that ends with an operator, so that the number is an operand
_OPERATION = re.compile(
    r"""
    (?<=\d)\.$                                              # 1.2.3
  | [\d)}\]!][$ \t]{0,3}                                    # left operand, and then
    (?:
        [+*\u00f7]                                          # 7 + 5
      | \\(?:times|cdot|div)                                # 7 \times 5
      | (?<=\d):(?=$)                                       # 5:7
      | [ \t]-[ \t]                                         # 7 - 5, but not 7-5
      | [ \t](?:mod|times|plus|minus|over|out[ ]of)[ \t]    # 5 out of 7
    )
    [ \t$({]{0,3}$
    """,
    re.VERBOSE,
)
_PART = re.compile(r"(?:[,;+*/&]|\\\\)[\s]{0,3}$")
_BRACKET = re.compile(r"\s{0,3}(?:[)\]>]|\\r(?:ight|angle)|\\\}|\\end)")
_MIXED_NUMBER = re.compile(r"[-+]?\d+[ ~]+(\d+)/(\d+)")
_MARK = re.compile(
    r"""
    (?<!\#)\#\#\#\#(?!\#)[ \t]{0,9}
    (?:
        (?:the[ ])?(?:final[ ])?answer(?:[ ]is)?[ \t]{0,9}[:=]?[ \t]{0,9}   # The final answer is:
    )?
    (?:[*_` \t]|\\?[(\[]){0,9}                                              # marks before the number
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Characters before a number that are searched for a denial
_DENIAL = 30
# A text without these words denies no number
_SOME_DENIAL = re.compile(
    r"\bno[tr]\b|never|n['\u2019]t|wrong|incorrect|false", re.IGNORECASE
)
_CURRENCY = re.compile(r"\\?[$\u20ac\u00a3\u00a5]")
# Characters before and behind the last number that show whether it is the result
_BEFORE = 60
_AFTER = 30
_PLAIN = r"[-+]?\d[\d,]*(?:\.\d+)?"
# A number of which the last one is no more than a part: 2 and 3, 2 or 3, 3 to 5, 5 in 7, 2/3 of 6, 2 : 3
_JOINED = re.compile(
    rf"""
    ({_PLAIN})%?[$)}}\]\\]{{0,3}}[ \t]{{0,3}}       # other number
    (?:
        ,?[ \t](?:or|and|to|in|of)[ \t]             # 2 and
      | [ \t]:[ \t]                                 # 2 :
    )
    [ \t${{(\\]{{0,3}}$
    """,
    re.VERBOSE,
)
# A change, such as from 3 to 5, ends in its result
_FROM = re.compile(r"(?<![A-Za-z])from[ \t$]{1,3}[-+]?[$\d.,%]{1,20} to[ \t$]{1,3}$")
# A list at the end of an answer: x = 2, 3
_LIST = re.compile(
    r"(?:\A|[\n=:,;#]|(?<![A-Za-z])(?:is|are))[ \t${([\\]{0,5}"
    rf"({_PLAIN})[$)}}\]\\]{{0,3}}[,;][ \t]{{1,3}}[${{(\\]{{0,3}}$"
)
_END = re.compile(r"[$)}\]\\.!]{0,4}[ \t]{0,3}(?:\n|\Z)")
# Several values of one variable: x = 2 or x = 3, x_1 = 2, x_2 = 3
_SAME_NAME = re.compile(
    rf"""
    (?<![A-Za-z\\])([A-Za-z])(?:_\{{?\w\}}?)?       # x, x_1
    [ \t]{{0,3}}=[ \t]{{0,3}}
    ({_PLAIN})[$)\\]{{0,3}}                         # first value
    (?:
        [ \t]{{0,3}}[,;]                            # comma between the values
      | [ \t]{{1,3}}(?:or|and)(?![A-Za-z])          # or word between the values
    )
    (?:[ \t]{{1,3}}(?:or|and))?[ \t$(\\]{{0,5}}
    \1(?:_\{{?\w\}}?)?                              # the same name
    [ \t]{{0,3}}=[ \t{{]{{0,3}}$
    """,
    re.VERBOSE,
)
# Text before a number that makes it a part of an expression
_NO_RESULT_BEFORE = re.compile(
    r"""
    (?:
        (?:\\pm|\\mp|\u00b1|\+/-|\+-|(?i:plus[ ]or[ ]minus))[ \t${(]{0,3}   # \pm 3
      | \d[ \t]x[ \t]                                                       # 3 x 4
      | [A-Za-z0-9)}.-]\(                                                   # f(2), 2(3), -(3), 0.(3)
      | (?<![A-Za-z])
        (?i:
            log|ln|sin|cos|tan|exp|sqrt|arcsin|arccos|arctan                # log 2, sin(30)
          | half(?:[ ]of)?|twice|double|triple                              # half of 6
          | (?:square|cube|cubic|factorial|root|thirds?|quarters?)[ ]of     # square of 6
          | (?:divided|multiplied)[ ]by
          | choose                                                          # 5 choose 2
        )
        [ \t$({]{1,3}
      | (?:(?<![A-Za-z\\])[a-z]|\\[A-Za-z]{2,10})                           # x or \pi, and then
        [$ \t]{0,2}(?:[+*/]|[ \t]-(?=[ \t]))[$ \t]{0,2}                     # an operator: x + 3, n/3
      | \d[-/]                                                              # 2024-05-17, 2/3/4
      | \d['\u2019]                                                         # 5'7"
      | \d[ \t](?:remainder|R|r\.?)[ \t]                                    # 2 remainder 3
    )$
    """,
    re.VERBOSE,
)
# x -3
_VARIABLE_BEFORE = re.compile(r"(?<![A-Za-z\\])[b-z][ \t]$")
_NO_SOLUTION = re.compile(
    r"""
    (?<![A-Za-z])no[ ](?:[a-z]{1,12}[ ]){0,2}
    (?:
        solutions?|answers?|roots?                  # no real solution
      | (?<=such[ ])[a-z]{1,12}                     # no such number
    )
    (?![A-Za-z]|[ ](?:other|except|but|besides?)[ ])
    [^.,;\n]{0,20}$
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Text behind a number that makes it a part of an expression
_NO_RESULT_AFTER = re.compile(
    r"""
    !\$|!\\\)                                               # $5!$
  | [$)}\]]{0,3}
    (?:
        [ \t]{1,2}
        (?:
            or[ ](?:more|less|fewer|greater)                # 5 or more
          | squared|cubed|factorial|choose|mod|divided[ ]by
          | and[ ]a[ ](?:half|third|quarter)                # 5 and a half
          | pi|i                                            # 5 pi
        )
        (?![A-Za-z'\u2019])
      | [ \t]?\u03c0                                        # 5 U+03C0
      | \+(?:[\s.)$]|\Z)                                    # 5+
      | \s{0,3}\\end\{                                      # last entry of a matrix
    )
    """,
    re.VERBOSE,
)
# A group of digits that ends a number with blanks, such as 10 000
_GROUP = re.compile(r"(?<![\w.,/])(\d{1,3}(?: \d{3}){0,4}) $")
# 1'000
_APOSTROPHE = re.compile(r"(?<=\d)['\u2019](?=\d{3}(?!\d))")
# 3 x 10^5
_TIMES = re.compile(r"(?<=\d)[ \t]?[xX][ \t]?(?=10[ \t]?(?:\^|\*\*))")
# Text after a number, on its line, that changes its value
_CLOSED = r"[$)\]}*_`]{0,4}"
_CHANGED = re.compile(
    rf"""
    {_CLOSED}[ \t]{{0,9}}
    (?:
        [\^!+<>\u00f7]                                                          # 5^2, 5!
      | \\(?:times|cdot|div|pm|pi|sqrt|frac|leq?|geq?|lt|gt)(?![A-Za-z])        # 5 \times 2
      | \*{{1,2}}[ \t]{{0,9}}[\d\\(]                                            # 5 * 10
      | -[ \t]{{0,9}}\d                                                         # 5 - 2
      | dozen(?![A-Za-z])
      | [(,]?[ \t]{{0,9}}(?:or|to|and|mod|times|over|plus|minus|out[ ]of)       # 5 or
        [ \t]{{1,9}}[-+$\\({{]{{0,4}}\d                                         # 6
    )
  | {_CLOSED}(?:[ \t]{{1,9}}|,[ \t]{{0,9}}|[:.])[-+$\\]{{0,3}}\d                # 5:30, 5, 6
  | (?:[xyzabceijknpqrtuvwKMB]|bn|mn)(?![A-Za-z])                               # 5x, 10k
  | x[0-9a-fA-F]                                                                # 0x1f
  | \.?\\(?:overline|bar|dot)(?![A-Za-z])                                       # 0.\overline{{3}}
  | \.\(\d                                                                      # 0.(3)
  | ,[ \t]{{0,3}}[-+]?\\infty                                                   # 5, \infty
    """,
    re.VERBOSE,
)
# Longest line that can be a result that is not a number
_LINE = 200
# What follows the number of a heading: #### 1. First, #### 2) Then
_HEADING = re.compile(r"[.):][ \t]{1,9}\S")


def marked(text: str) -> str | None:
    """Return the number directly after the last ####, as in GSM8K's solutions; None if there is none.

    If the text after the number changes its value, as in "#### 5 or 6" and "#### 5^2", return the whole line. Headings,
    such as "#### Step 2" and "#### 1. Add", do not count.
    """
    if "####" not in text:
        return None
    text = in_one_form(scaled(text))
    marks = [*_MARK.finditer(text)]
    for mark in reversed(marks[-_MARKED:]):
        at = mark.end()
        currency = _CURRENCY.match(text, at)
        if currency:
            at = currency.end()
        found = _TOKEN.match(text, at)
        if found and found["number"] and not _HEADING.match(text, found.end()):
            if _changed(text, found.end()):
                return text[at : at + _LINE].partition("\n")[0].strip()
            return _without_neighbour(found["number"])
    return None


def _changed(text: str, end: int) -> bool:
    """Return whether the text after a number changes its value. `end`: place behind the number."""
    changes = (_CHANGED, _ORDINAL, _NO_RESULT_AFTER)
    return any(change.match(text, end) for change in changes)


# 10 million, 1.2\text{ billion}
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
}
_SCALED = re.compile(
    rf"""
    (?<![\w.,])
    (\d{{1,3}}(?:,\d{{3}}){{1,4}}|\d{{1,12}})       # 1,200
    (\.\d{{1,12}})?                                 # .5
    (?:[\s~]|\\[,;:! ]){{0,3}}
    (?:\\(?:text|mathrm|mbox)\s?\{{\s{{0,3}})?      # \text{{
    (?:({"|".join(_SCALES)})\b)                     # million
    \s{{0,3}}\}}?
    """,
    re.IGNORECASE | re.VERBOSE,
)


def scaled(text: str) -> str:
    """Return a text with digits in place of words such as "million": 1.2 million becomes 1200000."""
    lower = text.lower()
    if not any(word in lower for word in _SCALES):
        return text
    return _SCALED.sub(_in_digits, text)


def _in_digits(found: re.Match[str]) -> str:
    """Return the digits of a number that matched `_SCALED`, and a blank."""
    value = Decimal(found[1].replace(",", "") + (found[2] or ""))
    value = value.scaleb(_SCALES[found[3].lower()])
    return f"{value.normalize():f} "


# minus 6, but not 7 minus 6
_NEGATIVE = re.compile(
    r"(?<![A-Za-z])(?:negative|(?<!\d )(?<!\w )minus)[ \t]{1,3}(?=\d)", re.IGNORECASE
)
# A number that a sentence denies: the answer is not 42; 42 is wrong
_DENIED_BEFORE = re.compile(
    r"""
    (?:(?<![A-Za-z])(?:not|never|nor)|n['\u2019]t)[ \t]{1,3}    # not, isn't
    (?:(?:be|equal[ ]to|equal|exactly)[ \t]{1,3})?              # not equal to
    [$\\({*`\"]{0,4}$
    """,
    re.IGNORECASE | re.VERBOSE,
)
_DENIED_AFTER = re.compile(
    r"""
    [$)}*`\"]{0,4}[ \t]{1,3}
    (?:
        (?:is|was|would[ ]be)[ \t]{1,3}(?:not|wrong|incorrect|false)    # is wrong
      | (?:isn|wasn)['\u2019]t                                          # isn't
    )
    (?![A-Za-z])
    """,
    re.IGNORECASE | re.VERBOSE,
)
# 42 is not only, 42 is not just
_ONLY = re.compile(r"[ \t]{1,3}(?:only|just)(?![A-Za-z])", re.IGNORECASE)


def denied(text: str, begin: int, end: int) -> bool:
    """Return whether a sentence says that a number is not the result. `begin`, `end`: place of the number."""
    if _DENIED_BEFORE.search(text, max(0, begin - _DENIAL), begin):
        return True
    after = _DENIED_AFTER.match(text, end)
    return after is not None and not _ONLY.match(text, after.end())


def without_denied(text: str) -> str:
    """Return a text without the numbers that a sentence denies, as in "the answer is not 42"."""
    if not _SOME_DENIAL.search(text):
        return text
    numbers = [found for found in _TOKEN.finditer(text) if found["number"]]
    wrong = {
        _without_neighbour(found["number"])
        for found in numbers
        if denied(text, found.start(), found.end())
    }
    parts: list[str] = []
    at = 0
    for found in numbers:
        if _without_neighbour(found["number"]) in wrong:
            parts.append(text[at : found.start()])
            at = found.end()
    return "".join([*parts, text[at:]])


def without_marks(text: str) -> str:
    """Return a text without tags, such as <answer>, and without marks of Markdown, such as **42** and > 42."""
    # Most texts have none of these marks, and searching for characters is much quicker than matching patterns
    if "<" in text:
        text = _TAG.sub(" ", text)
    if ">" in text:
        text = _QUOTE.sub("", text)
    return _without_emphasis(text)


def _without_emphasis(text: str) -> str:
    """Return a text without Markdown's emphasis, and without quotation marks around numbers."""
    if not _SOME_MARK.search(text):
        return text
    text = _EMPHASIZED_NUMBER.sub(r"\2", _EMPHASIS.sub(r"\2", text))
    return _QUOTED_NUMBER.sub(lambda found: f" {found[2] or found[3]} ", text)


def last_number(text: str) -> str:
    """Return the last number of a text, as it is written.

    Return "" in three cases: there is no number; the last value is an expression, such as a root or 7 + 5; a sentence
    says that the number is not the result. Digits within words are not numbers. A dash between two numbers or after a
    word is not a sign.
    """
    text = in_one_form(scaled(without_marks(text[-_READ:])))
    denials = _SOME_DENIAL.search(text) is not None
    wrong = set[str]()
    pairs = _braces(text)
    last = ""
    place = (0, 0)
    at = 0
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found["symbol"]:
            last = ""
            at = _behind_arguments(text, pairs, at)
        elif found["index"]:
            last = ""
        elif found["number"]:
            number = _without_neighbour(found["number"])
            at = found.start() + len(found["number"])
            power = _POWER.match(text, at)
            base = _BASE.match(text, at)
            if _ORDINAL.match(text, at):
                continue
            before = text[max(0, found.start() - _AROUND) : found.start()]
            if _REFERENCE.search(before):
                continue
            if base:
                at = _behind_operand(text, pairs, base.end())
            if denials and denied(text, found.start(), at):
                wrong.add(number)
                continue
            if _within_expression(text, found.start(), at):
                last = ""
            elif power and not _DEGREES.match(text, at):
                last = ""
                at = _behind_operand(text, pairs, power.end())
            elif _VARIABLE.match(text, at):
                last = ""
            else:
                last = number
                place = (found.start(), found.start() + len(found["number"]))
    if last in wrong:
        return ""
    return _result_at(text, *place, last)


def _result_at(text: str, begin: int, end: int, written: str) -> str:
    """Return the last number of a text; "" if it is one of several results, or a part of an expression.

    `begin`, `end`: the place of the number. `written`: the number as it is written, returned with its other digits if
    blanks separate them, as in 10 000.
    """
    before = text[max(0, begin - _BEFORE) : begin]
    after = text[end : end + _AFTER]
    group = _GROUP.search(before)
    if group and len(written) == 3 and written.isdecimal():
        return group[1].replace(" ", "") + written
    if _NO_RESULT_BEFORE.search(before) or _NO_RESULT_AFTER.match(after):
        return ""
    if written[:1] in ("-", "+") and _VARIABLE_BEFORE.search(before):
        return ""
    # |3|
    if before.endswith("|") and re.match(r"(?:\\right)?\|", after):
        return ""
    if _NO_SOLUTION.search(before):
        return ""
    # Several results; 42 and 42 are one
    joined = _JOINED.search(before)
    if joined and joined[1] != written and not _FROM.search(before):
        return ""
    listed = _LIST.search(before)
    if listed and listed[1] != written and _END.match(after):
        return ""
    named = _SAME_NAME.search(before)
    if named and named[2] != written:
        return ""
    return written


def in_one_form(text: str) -> str:
    """Return a text with 1'000 as 1,000, with 3 x 10^5 as 3 * 10^5, and with negative 6 as -6."""
    if "'" in text or "\u2019" in text:
        text = _APOSTROPHE.sub(",", text)
    if "10" in text:
        text = _TIMES.sub(" * ", text)
    return _NEGATIVE.sub("-", text)


def _within_expression(text: str, begin: int, end: int) -> bool:
    """Return whether a number is the end of a calculation, pair, interval, matrix or inequality, and so no result.

    `begin`, `end`: the place of the number.
    """
    before = text[max(0, begin - _AROUND) : begin]
    if _INEQUALITY.search(before) or _OPERATION.search(before):
        return True
    return bool(_PART.search(before) and _BRACKET.match(text, end))


def _without_neighbour(written: str) -> str:
    """Return a number as it is written; of two neighbours such as 12 10/5, which are no mixed number, the second."""
    mixed = _MIXED_NUMBER.match(written)
    if mixed and int(mixed[1]) >= int(mixed[2]):
        return re.split(r"[ ~]+", written, maxsplit=1)[1]
    return written


def _behind_arguments(text: str, pairs: dict[int, int], at: int) -> int:
    """Return the place behind the arguments in brackets and braces of a command, which ends at `at`.

    `pairs`: opening brace -> closing brace.
    """
    bracket = re.compile(r"\s{0,3}\[[^\[\]{}]{0,20}\]").match(text, at)
    if bracket:
        at = bracket.end()
    # \sqrt2 has an argument without braces
    single = re.compile(r"\s{0,3}\d").match(text, at)
    if single:
        return single.end()
    brace = re.compile(r"\s{0,3}(?=\{)").match(text, at)
    while brace and brace.end() in pairs:
        at = pairs[brace.end()] + 1
        brace = re.compile(r"\s{0,3}(?=\{)").match(text, at)
    return at


def _behind_operand(text: str, pairs: dict[int, int], at: int) -> int:
    """Return the place behind an exponent that begins at `at`. `pairs`: opening brace -> closing brace."""
    if at in pairs:
        return pairs[at] + 1
    operand = _OPERAND.match(text, at)
    if operand:
        return operand.end()
    return at


# ── one notation ─────────────────────────────────────────────────────────────────────────────────────────────────────

# Spacing and dollar signs of LaTeX
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[!,;:> ])|~|\$|\\\$")
_GROUPED = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,\\!|\\[,!;: ]|~|[ ])\d{3})++(?![\d,])"
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PRODUCT = re.compile(r"\\(?:times|cdot)(?![A-Za-z])")
_MONEY = re.compile(r"\\?[$\u20ac\u00a3\u00a5\u20b9]")
# Mixed fractions: 3\frac{1}{2} and 3 1/2 are three and a half
_MIXED = re.compile(
    r"""
    (?<![\d.,])(\d{1,9})                            # whole number, and then
    (?:
        \s*\\frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}   # \frac{1}{2}
      | \s+(\d{1,9})\s*/\s*(\d{1,9})                # 1/2
    )
    (?!\d)
    """,
    re.VERBOSE,
)
_UNIT = re.compile(r"\\(?:text|mathrm|textrm|mbox|textit)\s*\{([^{}]*)\}")
_BOLD = re.compile(r"\\(?:mathbf|textbf|boldsymbol|bm)\s*\{([^{}]*)\}")
_NAME = re.compile(
    r"[A-Za-z](?:_\{?\w{1,20}\}?)?(?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))"
)
# (A), and a number in brackets
_CHOICE = re.compile(rf"\(([A-Za-z]|\s?{_SINGLE}\s?)\)")
# Answer: 42
_LABEL = re.compile(
    r"(?:the )?(?:final )?(?:answer|result|solution)(?: is)?\s{0,3}[:=]\s{0,3}",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"\s*\\?%|\s*percent\b")
# A number and the words of a unit: 5 apples, 100 dollars, 5 km/h, 3 square meters, 5 cm^2
_MEASURED = re.compile(
    r"""
    ([-+]?[\d.,/]*\d)\s*                    # number
    (                                       # unit:
        (?:[A-Za-z]{2,20}|(?<=/)[A-Za-z])   # first word
        \.?
        (?:[\s/]{1,3}[A-Za-z]{1,20}){0,5}   # further words
        (?:\s?\^\s?\{?[23]\}?)?             # ^2
    )
    """,
    re.VERBOSE,
)
# Words behind a number that are a part of its value, and no unit
_PARTS_OF_VALUES = """
    pi sqrt sin cos tan log ln exp e i j k or and to mod times over plus minus is in
    hundred thousand million billion trillion dozen half halves third thirds
    st nd rd th squared cubed factorial
"""
_NO_UNITS = frozenset(_PARTS_OF_VALUES.split())


# A calculation that overflows gives infinity, and no exception
_WITHOUT_ERRORS = Context(traps=[])


def same(given: str, right: str) -> bool:
    """Return whether two results are equal: as numbers if both are numbers, else as text."""
    if max(len(given), len(right)) > _LONGEST:
        return bool(given.strip()) and given.strip() == right.strip()
    # Most results are whole numbers
    if given.isascii() and given.isdecimal() and right.isascii() and right.isdecimal():
        return Decimal(given) == Decimal(right)
    one = _Result(given)
    other = _Result(right)
    if one.value is None or other.value is None:
        return bool(one.text) and one.text == other.text
    # Units count only where both are written
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.value == other.value:
        return True
    # 50% is 0.5, too
    if one.percent and not other.percent:
        return one.value == _hundredfold(other.value)
    if other.percent and not one.percent:
        return other.value == _hundredfold(one.value)
    return False


def _hundredfold(value: Decimal) -> Decimal:
    """Return a value times 100; infinity if it is too large, such as 9e999999."""
    return _WITHOUT_ERRORS.multiply(Decimal(100), value)


class _Result:
    """A result in a uniform notation: `text`, the `value` of a number, its `unit`, and whether in `percent`."""

    def __init__(self, written: str) -> None:
        text = _uniform(_without_emphasis(plain_characters(written)))
        self.percent = bool(_PERCENT.search(text))
        text = _PERCENT.sub("", text).strip()
        self.unit = ""
        measured = _MEASURED.fullmatch(text)
        if measured and not _NO_UNITS.intersection(re.split(r"\W+", measured[2])):
            text = measured[1]
            self.unit = " ".join(measured[2].lower().split()).rstrip(".").rstrip("s")
        self.text = _compact(text)
        self.value = number(self.text)


def _uniform(text: str) -> str:
    """Return a result in a uniform notation, so that equal results become equal texts.

    Spacing, units and a name before an equal sign are removed, and fractions are written in the same way.
    """
    text = _PRODUCT.sub("*", scaled(text))
    text = text.replace("{,}", ",") if _THOUSANDS.search(text) else text
    # 10 000 and 10\,000; a comma with a blank separates two numbers
    text = _GROUPED.sub(lambda found: re.sub(r"[^\d]", "", found[0]), text)
    text = _SPACING.sub(" ", _MONEY.sub("", text))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "", text)
    text = _BOLD.sub(r"\1", text)
    # Units; a text that is nothing but a unit is the answer
    bare = _UNIT.sub(_unit, text).strip()
    text = bare or _UNIT.sub(r"\1", text)
    # x = ..., and x \in ...
    text = text.strip()
    named = _NAME.match(text) or _LABEL.match(text)
    if named:
        text = text[named.end() :]
    text = text.strip().removeprefix("=").strip()
    choice = _CHOICE.fullmatch(text)
    if choice:
        text = choice[1]
    # Fractions and roots with and without braces
    text = _full_fractions(text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = _MIXED.sub(_improper, text)
    return text.strip()


def _unit(found: re.Match[str]) -> str:
    """Return a blank for a unit in \\text{}, and the words themselves if they are a part of the value."""
    words = re.split(r"\W+", found[1].lower().strip())
    if _NO_UNITS.intersection(words):
        return f" {found[1]} "
    return " "


def _compact(text: str) -> str:
    """Return a text without blanks, where they separate no numbers, and without separators of thousands."""
    text = text.strip()
    # The dots of 3.33... mean further digits
    if not text.endswith("..."):
        text = text.rstrip(".").strip()
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    # The parts of a list are separated by a semicolon, so that no list looks like a number
    text = re.sub(r"\s*,\s*", ";", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)
    return "".join(text.split())


def _improper(found: re.Match[str]) -> str:
    """Return a mixed number that matched `_MIXED`, such as 3 1/2, as one fraction, 7/2; any other text unchanged."""
    whole, *parts = (int(each) for each in found.groups() if each is not None)
    above, below = parts
    if above < below:
        return f"{whole * below + above}/{below}"
    # With a larger numerator it is a product, not a mixed fraction
    return found[0]


_NEGATIVE_MONEY = re.compile(r"(?<![\w)\]}%.$])-\\?\$(?=\d)")
_PLAIN_MIXED = re.compile(r"(?<![\d.,/])(\d{1,9}) {1,3}(\d{1,9})/(\d{1,9})(?![\d/])")


# A plus sign that belongs to the number: +42 and x = +42, not 1 +42
_BEGIN = r"(^|[=:(\[]|(?<![\\A-Za-z])(?:is|are|equals))"
_PLUS = re.compile(rf"{_BEGIN}([ \t]{{0,3}})\+(?=\.?\d)", re.MULTILINE)
# answer:42
_COLON = re.compile(r"(?<=[A-Za-z]):(?=[-+]?\\?\$?\d)")
# A number in brackets that is the whole answer, or the end of the last sentence
_IN_BRACKETS = re.compile(
    rf"(\A\s{{0,9}}|[=:][ \t]{{0,3}}|(?<![\\A-Za-z])(?:is|are|equals)[ \t]{{1,3}})"
    rf"\(({_SINGLE})\)(?=\s{{0,9}}[.!]?\s{{0,9}}\Z)"
)


def plain_numbers(text: str) -> str:
    r"""Return a text with its numbers in a form that the library math-verify reads.

    3 1/2 is written as 7/2, -$5 as -5, \dfrac and \frac12 as \frac{1}{2}, +42, answer:42 and a last (42) as 42, and
    1.2 million as 1200000. Numbers that a sentence denies are left out.
    """
    text = without_denied(scaled(text))
    text = _IN_BRACKETS.sub(r"\1\2", _COLON.sub(": ", text))
    text = _PLUS.sub(r"\1\2", text)
    text = _PLAIN_MIXED.sub(_improper, _NEGATIVE_MONEY.sub("-", text))
    return _full_fractions(text)


def _full_fractions(text: str) -> str:
    r"""Return a text in which each fraction of digits is a \frac with braces."""
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac\s?(\d)\s?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s?(\d)\s?\{", r"\\frac{\1}{", text)
    return re.sub(r"(\\frac\s?\{[^{}]*\})\s?(\d)", r"\1{\2}", text)


_FRACTION = re.compile(r"(?<![\d}])\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TIMES_TEN = re.compile(
    r"(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d{1,4})\s*\}?$"
)
_WRITTEN = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.|\.\d+)?(?:(?<=[\d.])[eE][-+]?\d+)?"
)


def number(text: str) -> Decimal | None:
    r"""Return the value of a text such as 1,234.50, 3/4 or \frac{3}{4}; None if the text is not a finite number."""
    if len(text) > _LONGEST:
        return None
    # A fraction as a division, and 1.5 \times 10^3 as 1.5e3
    text = _FRACTION.sub(r"\1/\2", text).strip().strip("$")
    text = _TIMES_TEN.sub(r"e\1", text)
    above, slash, below = text.partition("/")
    try:
        value = _decimal(above)
        if slash:
            value /= _decimal(below)
    except ArithmeticError:  # not a number, a division by zero, or out of range
        return None
    if value.is_finite():
        return value
    return None


def _decimal(text: str) -> Decimal:
    """Return the value of digits with a sign, a point and commas between thousands. Raises ArithmeticError."""
    text = text.strip()
    if not _WRITTEN.fullmatch(text):
        raise ArithmeticError(text)
    return Decimal(text.replace(",", ""))
