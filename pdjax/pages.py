"""Who owns which KV page of one instance. Pure accounting: the controller keeps one pool per instance, real or not.

Invariant, checked by `check`: every usable page is either free or owned by exactly one owner. Page 0 is the zero page
that block tables are padded with; it is never given out.
"""

from collections.abc import Iterable

from pdjax.messages import InstanceSpec


class PagePool:
    """A free list and an owner table. An owner is a request's engine id; its pages are in token order."""

    def __init__(self, spec: InstanceSpec) -> None:
        self._free = list(range(spec.num_pages - 1, 0, -1))
        self._owned: dict[int, list[int]] = {}
        self._usable = spec.usable_pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owners(self) -> Iterable[int]:
        """Who has pages."""
        return self._owned

    def pages(self, owner: int) -> tuple[int, ...]:
        return tuple(self._owned.get(owner, ()))

    def count(self, owner: int) -> int:
        return len(self._owned.get(owner, ()))

    def take(self, owner: int, count: int) -> tuple[int, ...] | None:
        """Gives `count` more pages to `owner`; None, and nothing changes, if fewer are free."""
        if count > len(self._free):
            return None
        taken = tuple(self._free[: -count - 1 : -1])
        if count:
            del self._free[-count:]
        self._owned.setdefault(owner, []).extend(taken)
        return taken

    def release(self, owner: int) -> tuple[int, ...]:
        """Takes all pages back from `owner`, who may have none."""
        pages = tuple(self._owned.pop(owner, ()))
        self._free.extend(reversed(pages))
        return pages

    def check(self) -> None:
        """Raises RuntimeError when a page is lost or given twice."""
        seen = self._free + [page for pages in self._owned.values() for page in pages]
        if sorted(seen) != list(range(1, self._usable + 1)):
            raise RuntimeError(f"page accounting broken: {len(set(seen))} distinct of {self._usable} pages")
