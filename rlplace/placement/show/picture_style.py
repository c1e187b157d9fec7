"""Colours and text sizes of the picture, for light and dark pages."""

from __future__ import annotations

# (fill, ink on a light page, ink on a dark page); the fills carry white text and differ for the colour-blind.
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
_LIGHT = (
    ".page{fill:#ffffff;stroke:#d0d7de}.ink{fill:#1f2328}.soft{fill:#59636e}",
    ".arrow{fill:none;stroke:#818b98;stroke-width:2.5;stroke-linecap:round;stroke-linejoin:round}",
    ".free{fill:none;stroke:#c8d1da;stroke-dasharray:3 4}.on{fill:#ffffff}.cut{stroke:#ffffff;stroke-opacity:.45}",
    "text{font-size:12px}.title{font-size:21px;font-weight:650}.stage{font-size:16px;font-weight:650}.name{font-weight:650}",
    ".weights{fill-opacity:.14;stroke-width:1.5}.waits{fill-opacity:.05;stroke-opacity:.6;stroke-dasharray:4 3}",
    ".over{fill:none;stroke:#d1242f;stroke-width:3}.alarm{fill:#d1242f;font-weight:650}",
)
_DARK = (
    ".page{fill:#0d1117;stroke:#30363d}.ink{fill:#f0f6fc}.soft{fill:#9198a1}",
    ".arrow{stroke:#656c76}.free{stroke:#3d444d}.weights{fill-opacity:.26}",
    ".over{stroke:#ff7b72}.alarm{fill:#ff7b72}",
)


def colour(number: int) -> int:
    """Of the component with this number in the plan; they repeat where there are many."""
    return number % len(PALETTE)


def style(components: int) -> str:
    """The style sheet for so many components: `f0` fills, `s0` fills and strokes, `t0` writes in the first one's."""
    light, dark = list(_LIGHT), list(_DARK)
    for i, (fill, ink, pale) in enumerate(PALETTE[:components]):
        light.append(f".f{i}{{fill:{fill}}}.s{i}{{fill:{fill};stroke:{fill}}}.t{i}{{fill:{ink}}}")
        dark.append(f".t{i}{{fill:{pale}}}")
    return f"<style>{''.join(light)}@media (prefers-color-scheme:dark){{{''.join(dark)}}}</style>"


def width_of(text: str, size: float = 12.0, *, bold: bool = False) -> float:
    """About how wide a text is, in pixels; fonts differ."""
    return len(text) * size * (0.58 if bold else 0.5)
