"""Page accounting."""

import pytest

from pdjax.messages import Role
from pdjax.pages import PagePool
from pdjax.testing import spec


def pool(pages: int = 5) -> PagePool:
    return PagePool(spec(0, Role.MIXED, num_pages=pages))


def test_the_zero_page_is_never_given_out():
    assert sorted(pool().take(1, 4) or ()) == [1, 2, 3, 4]


def test_taking_more_than_is_free_changes_nothing():
    pages = pool()
    assert pages.take(1, 5) is None
    assert pages.free == 4
    pages.check()


def test_pages_of_an_owner_are_in_the_order_of_taking():
    pages = pool()
    first, second = pages.take(7, 2), pages.take(7, 1)
    assert pages.pages(7) == (*first, *second)


def test_release_gives_all_back_once():
    pages = pool()
    pages.take(1, 3)
    assert len(pages.release(1)) == 3
    assert pages.release(1) == ()
    assert pages.free == 4


def test_a_page_given_twice_is_noticed():
    pages = pool()
    pages.take(1, 1)
    pages._owned[2] = list(pages.pages(1))
    with pytest.raises(RuntimeError, match="page accounting broken"):
        pages.check()
