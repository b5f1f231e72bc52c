"""Shows answers while they are generated: pieces of text enter, from any thread; a terminal's lines leave.

Called by `serve`. On a terminal the answers grow in a panel. Elsewhere every line carries the number of its answer and
is printed when it is full, so that interleaved answers stay readable.
"""

import textwrap
import threading
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdjax.workload import Item

SHOWN = 4
"""Answers shown at the same time: a panel must fit a terminal."""
WIDTH = 100


class Answers:
    """Shows the first SHOWN answers of a run. A context manager; call it with (item's index, new text)."""

    def __init__(self, console: Console, items: Sequence[Item]) -> None:
        self._console = console
        self._questions = [question(item) for item in items[:SHOWN]]
        self._count = len(items)
        self._texts = [""] * len(self._questions)
        self._printed = [0] * len(self._questions)  # characters of each text, without a terminal
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=8)

    def __enter__(self) -> "Answers":
        if self._console.is_terminal:
            self._live.start(refresh=True)
        else:
            if self._count > SHOWN:
                self._console.print(f"the first {SHOWN} of {self._count} answers:", highlight=False)
            for number, text in enumerate(self._questions):
                self._line(number, f"? {text}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            for number in range(len(self._texts)):
                self._flush(number, everything=True)

    def __call__(self, index: int, text: str) -> None:
        if index >= len(self._texts):
            return
        with self._lock:
            self._texts[index] += text
            if not self._console.is_terminal:
                self._flush(index, everything=False)

    def _flush(self, number: int, *, everything: bool) -> None:
        """Prints the lines that are full: up to a line's end, or to the last blank of WIDTH characters."""
        while rest := self._texts[number][self._printed[number] :]:
            head, newline, _ = rest.partition("\n")
            if len(head) > WIDTH:
                cut = head.rfind(" ", 1, WIDTH + 1)
                line = head[: cut if cut > 0 else WIDTH]
                self._printed[number] += len(line)
            elif newline or everything:
                line = head
                self._printed[number] += len(head) + len(newline)
            else:
                return
            if line.strip():
                self._line(number, line.strip())

    def _line(self, number: int, text: str) -> None:
        self._console.print(Text(f"[{number}] {text}"), soft_wrap=True)

    def _panel(self) -> Table:
        with self._lock:
            texts = list(self._texts)
        table = Table.grid(padding=(0, 1))
        for number, (asked, answer) in enumerate(zip(self._questions, texts, strict=True)):
            table.add_row(Text(f"{number}", "dim"), Text(asked, "bold"))
            table.add_row("", Text(answer.strip()))
        return table


def question(item: Item) -> str:
    """What was asked, in one short line."""
    if isinstance(item.prompt, str):
        text = item.prompt
    elif isinstance(item.prompt[-1], dict):
        text = item.prompt[-1]["content"]
    else:
        return f"{len(item.prompt)} token ids"
    return textwrap.shorten(text, WIDTH - 10, placeholder=" ...")
