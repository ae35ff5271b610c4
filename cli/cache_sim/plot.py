"""Hit rates over slot shares as an SVG file, drawn without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 48
COLOURS = ("#1b6ca8", "#c8553d", "#2e8b57", "#8a5a9e", "#b8860b", "#555555")


def line_chart(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], dashed: Sequence[str]) -> str:
    """``lines``: name -> points (slot share, hit rate), both 0..1, by share. Names in ``dashed`` are bounds.

    The x axis ends at the largest share.
    """
    most = max(x for points in lines.values() for x, _ in points)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + plot_width * x / most, TOP + plot_height * (1 - y)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for percent in range(0, 101, 20):
        x, y = place(0, percent / 100)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{LEFT + plot_width}" stroke="#dddddd"/>')
        out.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for share in sorted({x for points in lines.values() for x, _ in points}):
        x, y = place(share, 0)
        out.append(f'<path d="M{x:.1f} {y:.1f}v5" stroke="#333333"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{100 * share:.3g} %</text>')
    out.append(f'<path d="M{LEFT} {TOP}v{plot_height}h{plot_width}" fill="none" stroke="#333333"/>')
    middle = LEFT + plot_width / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">slots, share of all experts</text>')
    label_y = -1e9
    by_end = sorted(lines.items(), key=lambda item: -item[1][-1][1])
    for i, (name, points) in enumerate(by_end):
        colour = COLOURS[i % len(COLOURS)]
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in points)
        dash = ' stroke-dasharray="6 4"' if name in dashed else ""
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for x, y in (place(*point) for point in points):
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        x, y = place(*points[-1])
        label_y = max(y + 4, label_y + 14)  # labels below each other, none on another
        out.append(f'<text x="{x + 10:.1f}" y="{label_y:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
