"""What a reproduction is asked for and what it finds: a `Setup` enters every paper's `run`, an `Outcome` leaves."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What a paper's module is told.

    Attributes:
        data: the folder with published measurements and traces; None: none is there.
        quick: fewer and shorter runs.
        seed: of all that is random.
        say: tells a person how far it is, one line.
    """

    data: Path | None
    quick: bool
    seed: int
    say: Callable[[str], None]

    def folder(self) -> Path:
        """`data`. ValueError where there is none."""
        if self.data is None:
            raise ValueError("data is not given; allowed with this paper: the folder with the published measurements")
        return self.data


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One published result beside ours.

    Attributes:
        what: in a few words, where it is in the paper included.
        published, ours: values, or words such as an order; None: there is none.
        unit: of the values.
        tolerance: what `ours` may be off and count as reproduced: of the published value ("relative"), or in units of
            it ("absolute"). None: it is only shown.
        note: why it is off, or what has to be known.
    """

    what: str
    published: float | str | None
    ours: float | str | None
    unit: str = ""
    tolerance: float | None = None
    kind: Literal["relative", "absolute"] = "relative"
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Relative or absolute, as `kind` says; None where it is no number."""
        if not isinstance(self.published, int | float) or not isinstance(self.ours, int | float):
            return None
        if self.kind == "absolute":
            return self.ours - self.published
        return self.ours / self.published - 1 if self.published else None

    @property
    def reached(self) -> bool | None:
        """Whether it is within its tolerance; words have to be equal. None: nothing is asked for."""
        if self.tolerance is None:
            return None
        difference = self.difference
        return self.published == self.ours if difference is None else abs(difference) <= self.tolerance


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one paper's module found.

    Attributes:
        title: of its table.
        rows: published beside ours.
        summary: for summary.json, besides the rows.
        plot: draws a picture into a file; None: there is none.
    """

    title: str
    rows: tuple[Row, ...]
    summary: dict[str, Any]
    plot: Callable[[Path], None] | None = None
