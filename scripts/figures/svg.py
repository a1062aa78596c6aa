"""A small SVG writer, with one element per line and integer coordinates, so that a diff can be read."""

import html

__all__ = ["Figure"]

# The colours of all figures: forward is blue, backward orange, which colour-blind readers can tell apart.
# Of a split backward, input gradients are lighter, and weight gradients darker.
_STYLE = """\
text { font-family: sans-serif; font-size: 13px; fill: #222; text-anchor: middle }
.start { text-anchor: start }
.small { font-size: 11px }
.strong { font-weight: bold }
.halo { paint-order: stroke; stroke: #fff; stroke-width: 4px }
.page { fill: #fff }
.frame { fill: #f7f7f7; stroke: #222; stroke-width: 2 }
.box { fill: #fff; stroke: #666 }
.light { fill: #fff }
.forward { fill: #8cccf0; stroke: #222 }
.backward { fill: #f2b84b; stroke: #222 }
.input_gradients { fill: #f6d58b; stroke: #222 }
.weight_gradients { fill: #e08a5a; stroke: #222 }
.dark_forward { fill: #1f6f9f; stroke: #222 }
.dark_backward { fill: #c4500c; stroke: #222 }
.dark_input_gradients { fill: #d19a2a; stroke: #222 }
.dark_weight_gradients { fill: #9c3f0b; stroke: #222 }
.update { fill: #d5dae0; stroke: #222 }
.idle { fill: #fff; stroke: #ccc }
.line { fill: none; stroke: #222; stroke-width: 2 }
.dashed { fill: none; stroke: #222; stroke-width: 2; stroke-dasharray: 6 4 }
.thin { fill: none; stroke: #999 }
.head { fill: #222 }"""
_WITH_LIGHT_TEXT = ("dark_forward", "dark_backward", "dark_weight_gradients")


class Figure:
    """One figure, on white, so that it can be read on a dark page too."""

    def __init__(self, title: str, width: int, height: int, *styles: str) -> None:
        """Starts a figure; the title is what a screen reader says, and styles are added to those of all."""
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            "<style>",
            *_STYLE.splitlines(),
            *styles,
            "</style>",
        ]
        self.rect("page", 0, 0, width, height)

    def rect(self, style: str, x: int, y: int, width: int, height: int) -> None:
        """A rectangle by its upper left corner; `style` is a class, here and below."""
        self._element("rect", style, x=x, y=y, width=width, height=height)

    def text(self, x: int, y: int, text: str, style: str = "") -> None:
        """A line of text by its baseline, centred on x unless the style has "start"."""
        self._element("text", style, html.escape(text), x=x, y=y)

    def box(self, style: str, x: int, y: int, width: int, height: int, text: str) -> None:
        """A rectangle with a line of small text in the middle."""
        self.rect(style, x, y, width, height)
        text_style = "small light" if style in _WITH_LIGHT_TEXT else "small"
        self.text(x + width // 2, y + height // 2 + 4, text, text_style)

    def line(self, style: str, *points: tuple[int, int]) -> None:
        """A line through points."""
        self._element("polyline", style, points=_join(points))

    def arrow(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """A horizontal or vertical arrow."""
        (x, y), along = end, (end[0] > start[0]) - (end[0] < start[0])
        down = (end[1] > start[1]) - (end[1] < start[1])
        back_x, back_y = x - 8 * along, y - 8 * down
        self.line("line", start, (back_x, back_y))
        wings = [(back_x + side * down, back_y + side * along) for side in (5, -5)]
        self._element("polygon", "head", points=_join([end, *wings]))

    def render(self) -> str:
        """The file's text."""
        return "\n".join([*self._lines, "</svg>", ""])

    def _element(self, tag: str, style: str, content: str = "", **attributes: int | str) -> None:
        assert not any(isinstance(value, float) for value in attributes.values())
        named = {"class": style, **attributes} if style else attributes
        written = " ".join(f'{name}="{value}"' for name, value in named.items())
        self._lines.append(f"<{tag} {written}>{content}</{tag}>" if content else f"<{tag} {written}/>")


def _join(points: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
