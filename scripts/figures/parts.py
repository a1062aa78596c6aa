"""Parts of figures: layers in frames, and timetables as grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from figures import facts
from figures.svg import Figure
from ipu_pipeline.engine import schedules
from ipu_pipeline.ground.pytrees import num_bytes

__all__ = [
    "FRAME_HEIGHT",
    "FRAME_TOP",
    "MARGIN",
    "Grid",
    "draw_feeds",
    "draw_frame",
    "draw_legend",
    "frame_width",
]

MARGIN = 16
FRAME_TOP = 40  # a frame's label and number of parameters
_BOX_WIDTH, _BOX_HEIGHT, _BOX_GAP, _PADDING = 88, 68, 12, 12  # a layer, and the frame around layers
FRAME_HEIGHT = _BOX_HEIGHT + 2 * _PADDING
_CELL_HEIGHT, _UPDATE_CELLS = 28, 2


def frame_width(layers: Sequence[facts.Layer]) -> int:
    """How wide a frame around some layers is."""
    return len(layers) * (_BOX_WIDTH + _BOX_GAP) - _BOX_GAP + 2 * _PADDING


def draw_frame(figure: Figure, x: int, y: int, label: str, layers: Sequence[facts.Layer]) -> dict[int, int]:
    """Draws the layers of one IPU in a frame.

    Args:
      figure: to draw on.
      x: the frame's left edge.
      y: its upper edge; the label stands above.
      label: what the frame is.
      layers: what is in it.

    Returns:
      For each leaf of the micro-batch that they read, the middle of the layer that reads it.
    """
    figure.rect("frame", x, y, frame_width(layers), FRAME_HEIGHT)
    figure.text(x + 2, y - 24, label, "start strong")
    total = sum(layer.num_parameters for layer in layers)
    figure.text(x + 2, y - 8, f"{total:,} parameters", "start small")
    feeds: dict[int, int] = {}
    for place, layer in enumerate(layers):
        left = x + _PADDING + place * (_BOX_WIDTH + _BOX_GAP)
        middle, top = left + _BOX_WIDTH // 2, y + _PADDING
        figure.rect("box", left, top, _BOX_WIDTH, _BOX_HEIGHT)
        figure.text(middle, top + 20, layer.name, "strong")
        figure.text(middle, top + 40, " x ".join(map(str, layer.output.shape)) or "scalar", "small")
        figure.text(middle, top + 57, f"{layer.num_parameters:,}", "small")
        if place:
            figure.arrow((left - _BOX_GAP, top + _BOX_HEIGHT // 2), (left, top + _BOX_HEIGHT // 2))
        feeds |= dict.fromkeys(layer.feeds, middle)
    return feeds


def draw_feeds(figure: Figure, y: int, feeds: dict[int, int]) -> None:
    """Draws what comes from the infeed, below the frames."""
    for (name, aval), index in zip(facts.micro_batch().items(), sorted(feeds), strict=True):
        figure.arrow((feeds[index], y + 34), (feeds[index], y))
        figure.text(feeds[index], y + 50, name, "small")
        figure.text(feeds[index], y + 64, f"{num_bytes([aval]):,} bytes", "small")


def draw_legend(figure: Figure, y: int, *more: str) -> None:
    """Says what stands in the box of a layer, and more lines."""
    size = facts.defaults().batch_size
    lines = [
        f"In each box: the layer, the shape of its output ({size} examples), its number of parameters."
    ]
    for number, line in enumerate([*lines, *more]):
        figure.text(MARGIN, y + 16 * number, line, "start small")


@dataclass(frozen=True)
class Grid:
    """A timetable: an IPU per row, a time-step per column, the weight update last.

    Attributes:
      table: the timetable.
      top: the upper edge.
      cell_width: of a column.
      idle_text: what stands in the cells of an IPU that waits.
      columns_per_line: after so many time-steps the timetable is continued below.
      followed: a micro-batch that is drawn darker than the others; None: none.
    """

    table: schedules.Timetable
    top: int
    cell_width: int = 32
    idle_text: str = ""
    columns_per_line: int = 24
    followed: int | None = None

    @property
    def width(self) -> int:
        """Of the whole figure."""
        num_time_steps = self.table.num_time_steps
        last_line = (num_time_steps - 1) % self.columns_per_line + 1 + _UPDATE_CELLS
        columns = max(min(num_time_steps, self.columns_per_line), last_line)
        return self.x(1) + columns * self.cell_width + MARGIN

    @property
    def height(self) -> int:
        """Of the whole figure."""
        return self._legend_top + 48

    @property
    def update_edges(self) -> tuple[int, int]:
        """The left and right edge of the weight update."""
        left = self.x(self.table.num_time_steps) + self.cell_width
        return left, left + _UPDATE_CELLS * self.cell_width

    def x(self, time_step: int) -> int:
        """The left edge of a column; long timetables are continued on further lines."""
        return MARGIN + 44 + (time_step - 1) % self.columns_per_line * self.cell_width

    def draw(self, figure: Figure) -> None:
        """Draws all cells, and a legend below."""
        num_ipus, num_time_steps = len(self.table.rows), self.table.num_time_steps
        for time_step in range(1, num_time_steps + 1):
            if self.x(time_step) == self.x(1):
                for ipu in range(num_ipus):
                    figure.text(MARGIN, self._y(time_step, ipu) + 19, f"IPU {ipu}", "start")
            middle = self.x(time_step) + self.cell_width // 2
            figure.text(middle, self._y(time_step, 0) - 5, str(time_step), "small")
        timed = list(zip(self.table.order, self.table.time_steps, strict=True))
        busy = {(action.stage, time_step) for action, time_step in timed}
        for time_step in range(1, num_time_steps + 1):
            for ipu in range(num_ipus):
                if (ipu, time_step) not in busy:
                    self._draw_cell(figure, time_step, ipu, "idle", self.idle_text)
        for action, time_step in timed:  # after the idle cells, whose lines are paler
            style = self._prefix(action.micro_batch) + action.kind.name.lower()
            text = f"{action.kind.letter}{action.micro_batch}"
            self._draw_cell(figure, time_step, action.stage, style, text)
        left, right = self.update_edges
        for ipu in range(num_ipus):
            y = self._y(num_time_steps, ipu)
            figure.box("update", left, y, right - left, _CELL_HEIGHT, "update")
        self._draw_legend(figure)

    def _prefix(self, micro_batch: int) -> str:
        return "dark_" if micro_batch == self.followed else ""

    @property
    def _legend_top(self) -> int:
        return self._y(self.table.num_time_steps, len(self.table.rows)) + 20

    def _y(self, time_step: int, ipu: int) -> int:
        line_height = len(self.table.rows) * _CELL_HEIGHT + 36
        return self.top + 16 + (time_step - 1) // self.columns_per_line * line_height + ipu * _CELL_HEIGHT

    def _draw_cell(self, figure: Figure, time_step: int, ipu: int, style: str, text: str) -> None:
        figure.box(style, self.x(time_step), self._y(time_step, ipu), self.cell_width, _CELL_HEIGHT, text)

    def _draw_legend(self, figure: Figure) -> None:
        num_time_steps = self.table.num_time_steps
        num_busy = len(self.table.order) // len(self.table.rows)
        figure.text(
            MARGIN,
            self._legend_top,
            f"{num_time_steps} time-steps. Each IPU works in {num_busy} of them and waits in "
            f"{num_time_steps - num_busy}: {facts.percent_idle(self.table)}% idle.",
            "start",
        )
        x = MARGIN
        shown = self.followed or 0
        for style, text, meaning, width in [
            ("forward", "F", f"forward of micro-batch {shown}", 220),
            ("backward", "B", "its backward", 160),
            ("idle", self.idle_text, "the IPU waits", 160),
            ("update", "update", "weight update", 160),
        ]:
            is_action = style not in ("idle", "update")
            named = f"{self._prefix(shown)}{style}" if is_action else style
            figure.box(named, x, self._legend_top + 14, 48, 20, text + str(shown) * is_action)
            figure.text(x + 56, self._legend_top + 28, meaning, "start small")
            x += width
