"""Elements of pictures: attributes, escaping, colours."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from rlplace.placement.show.drawing import (
    PALETTE,
    colour,
    element,
    picture,
    text,
    title,
    width_of,
)

ODD = "<a> & \"b\" 'c'"


def test_an_element_has_its_attributes_in_order() -> None:
    made = element("rect", class_="f0", x=1.25, y=2, text_anchor=None, aria_label="a")
    assert made == '<rect class="f0" x="1.2" y="2" aria-label="a"/>'


def test_odd_letters_survive_in_attributes_and_texts() -> None:
    made = element("g", title(ODD), text(0, 0, ODD, "ink"), aria_label=ODD)
    parsed = ET.fromstring(made)
    assert parsed.get("aria-label") == ODD
    assert [inside.text for inside in parsed] == [ODD, ODD]


def test_a_picture_has_a_page_and_only_the_colours_it_uses() -> None:
    made = picture(20, 10, ODD, [element("path", d="M0 0")], components=2)
    parsed = ET.fromstring(made)
    assert parsed.get("viewBox") == "0 0 20 10"
    assert [part.tag.rpartition("}")[2] for part in parsed] == ["style", "rect", "path"]
    assert ".f1{" in made
    assert ".f2{" not in made


def test_colours_repeat() -> None:
    assert colour(len(PALETTE) + 1) == 1


def test_bold_and_tall_texts_are_wider() -> None:
    assert width_of("name", bold=True) > width_of("name")
    assert width_of("name", 24.0) == 2 * width_of("name", 12.0)
