"""The plot of measured figures as bars, for tables.py and its like."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """A bar as long as a share of the whole scale, what stands at its end, and its tooltip."""

    share: float
    colour: str
    label: str
    title: str


def bar_chart(title: str, groups: dict[str, list[Bar | None]], ticks: dict[int, str]) -> str:
    """SVG of horizontal bars in named groups; ``ticks``: percent of the scale -> its label."""
    left, full, bar, top = 280, 400, 9, 44
    step = (bar + 1) * max(map(len, groups.values())) + 8
    height = top + step * len(groups) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + full + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="16">{title}</text>',
    ]
    for percent, label in ticks.items():
        x = left + full * percent // 100
        parts += [
            f'<path d="M{x} {top - 6}V{height - 8}" stroke="#ddd"/>',
            f'<text x="{x}" y="{top - 10}" text-anchor="middle" fill="#666">{label}</text>',
        ]
    for place, (name, bars) in enumerate(groups.items()):
        y = top + step * place
        middle = y + step // 2 - 1
        parts.append(f'<text x="{left - 8}" y="{middle}" text-anchor="end">{name}</text>')
        for line, one in enumerate(bars):
            if one is None:
                continue
            end, at = left + full * min(one.share, 1.0), y + (bar + 1) * line
            parts += [
                f'<rect x="{left}" y="{at}" width="{end - left:.1f}" height="{bar}" '
                f'fill="{one.colour}"><title>{one.title}</title></rect>',
                f'<text x="{end + 4:.1f}" y="{at + bar - 1}" font-size="9" fill="#444">'
                f"{one.label}</text>",
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"
