"""The one writer of SVG: elements, escaped texts, colours, the width of a text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

# (fill, ink on a light page, ink on a dark page); the fills carry white text and differ
# for the colour-blind.
PALETTE = (
    ("#2f6fdb", "#1d4fa8", "#8fb6ff"),
    ("#1c8a5f", "#116142", "#6fd3a8"),
    ("#c9620b", "#8f4404", "#ffb26b"),
    ("#8250df", "#5f33b3", "#c4a7ff"),
    ("#0c7f93", "#07596a", "#6ccfe0"),
    ("#bf3989", "#8d2463", "#ff9bce"),
    ("#7a6a12", "#574b09", "#dcc862"),
    ("#59636e", "#3d444d", "#b1bac4"),
    ("#a3402f", "#772b1f", "#ffa392"),
    ("#4b55c8", "#343c99", "#a9b1ff"),
)
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
# The last block of the style sheet is for dark pages.
_STYLE = Path(__file__).with_name("picture.css")
_XMLNS = "http://www.w3.org/2000/svg"
_USUAL_SIZE = 12.0  # pixels of a text's height
# Widths of letters in heights of the text.
_NARROW = 0.38
_USUAL = 0.63
_WIDE = 0.88
_BOLD = 1.12  # times as wide as a regular letter
_NARROW_LETTERS = "iljft.,:;|()-\u2013 "
_WIDE_LETTERS = "mwMWGB%\u2192"

Attribute = str | float | None


def element(name: str, *inside: str, **attributes: Attribute) -> str:
    """Return an SVG element as text.

    `inside`: the content of the element, which must be SVG already. `attributes`: name -> value. In a name, each `_`
    becomes `-`, and a last `_` is removed (`class_`). A float is written with one decimal. An attribute with the value
    None is left out.
    """
    written = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        if isinstance(value, float):
            value = f"{value:.1f}"
        attribute = key.removesuffix("_").replace("_", "-")
        written.append(f'{attribute}="{escape(str(value))}"')
    head = " ".join(written)
    if inside:
        return f"<{head}>{''.join(inside)}</{name}>"
    return f"<{head}/>"


def text(x: float, y: float, shown: str, look: str, **attributes: Attribute) -> str:
    """Return a text element whose left end is at `x` and whose base line is at `y`, in pixels.

    `shown`: the text, which is escaped here. `look`: the class of the element in the style sheet.
    """
    return element("text", escape(shown), class_=look, x=x, y=y, **attributes)


def title(shown: str) -> str:
    """Return an SVG title element. A browser shows `shown` while the pointer is on the element around the title."""
    return element("title", escape(shown))


def span(shown: str, look: str) -> str:
    """Return SVG for a part of a text with its own style. `shown`: the part. `look`: its class in the style sheet."""
    return element("tspan", escape(shown), class_=look)


def swatch(x: float, y: float, width: int, look: str) -> str:
    """Return SVG for a small rectangle of a legend. `x`, `y`: its corner. `look`: its class in the style sheet."""
    return element("rect", class_=look, x=x, y=y, width=width, height=14, rx=4)


def picture(
    width: int,
    height: int,
    label: str,
    parts: Iterable[str],
    *,
    components: int,
    looks: str = "",
) -> str:
    """Return an SVG document: a page of `width` x `height` pixels with `parts` on it.

    `label`: a description of the picture for screen readers. `parts`: SVG elements. `components`: how many colours are
    used. `looks`: CSS rules that are added to the style sheet.
    """
    # Half a pixel further in: the line around the page is one pixel wide.
    page = element(
        "rect",
        class_="page",
        x="0.5",
        y="0.5",
        width=width - 1,
        height=height - 1,
        rx=12,
    )
    sheets = [style(components)]
    if looks:
        sheets.append(element("style", looks))
    # One part on each line.
    inside = "\n".join(["", *sheets, page, *parts, ""])
    document = element(
        "svg",
        inside,
        xmlns=_XMLNS,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        font_family=FONT,
    )
    return f"{document}\n"


def colour(number: int) -> int:
    """Return the number of a component's colour. The colours repeat if there are more components than colours.

    `number`: index of the component in the plan.
    """
    return number % len(PALETTE)


def style(components: int) -> str:
    """Return an SVG style element with the classes of the colours of the first `components` components.

    For colour 0, class `f0` is its fill, `s0` its fill and stroke, and `t0` its colour for texts.
    """
    sheet = "".join(_STYLE.read_text(encoding="utf-8").splitlines())
    light, at, dark = sheet.partition("@media")
    looks = ""
    dark_inks = ""
    for number, (fill, ink, dark_ink) in enumerate(PALETTE[:components]):
        looks += f".f{number}{{fill:{fill}}}"
        looks += f".s{number}{{fill:{fill};stroke:{fill}}}"
        looks += f".t{number}{{fill:{ink}}}"
        dark_inks += f".t{number}{{fill:{dark_ink}}}"
    # The rules for dark pages go inside the last block, before its brace.
    return element("style", f"{light}{looks}{at}{dark.removesuffix('}')}{dark_inks}}}")


def width_of(shown: str, size: float = _USUAL_SIZE, *, bold: bool = False) -> float:
    """Return the estimated width of a text in pixels. `size`: font size in pixels.

    Letters are assumed to be as wide as in DejaVu Sans, the widest of the fonts in use.
    """
    heights = 0.0
    for letter in shown:
        if letter in _NARROW_LETTERS:
            heights += _NARROW
        elif letter in _WIDE_LETTERS:
            heights += _WIDE
        else:
            heights += _USUAL
    width = heights * size
    if bold:
        width *= _BOLD
    return width
