"""What every mirror of engine caches must do, the radix index and its naive twin alike.

`test_index_<n>_...` are failures that other routers had.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rolloutd.scheduler.index import EngineCacheMirror, Namespace, PrefixIndex
from rolloutd.scheduler.index_naive import NaivePrefixIndex
from tests.scheduler.index_kit import SPACE, UNBOUNDED, ids, run_of


@pytest.fixture(params=["radix", "naive"])
def mirror(request: pytest.FixtureRequest) -> Iterator[EngineCacheMirror]:
    mirror = PrefixIndex(UNBOUNDED) if request.param == "radix" else NaivePrefixIndex()
    yield mirror
    if isinstance(mirror, PrefixIndex):
        mirror.check()


def test_a_match_is_the_longest_insert_in_common(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    assert mirror.insert(SPACE, run_of(1, 64), "a") == 4
    assert mirror.insert(SPACE, run_of(1, 32) + run_of(2, 32), "b") == 4
    assert mirror.insert(SPACE, run_of(1, 96), "a") == 2
    assert mirror.match(SPACE, run_of(1, 80)) == {"a": 80, "b": 32}
    assert mirror.match(SPACE, run_of(1, 32) + run_of(2, 16)) == {"a": 32, "b": 48}
    assert mirror.match(SPACE, run_of(3, 32)) == {}
    assert mirror.match(SPACE, b"") == {}


def test_credit_is_whole_pages_of_index_and_engine(mirror: EngineCacheMirror) -> None:
    for engine, page_tokens in (("one", 1), ("sixteen", 16), ("sixty-four", 64), ("odd", 24)):
        mirror.add_engine(engine, page_tokens)
        mirror.insert(SPACE, run_of(1, 150), engine)
    assert mirror.match(SPACE, run_of(1, 200)) == {"one": 144, "sixteen": 144, "sixty-four": 128, "odd": 144}
    assert mirror.match(SPACE, run_of(1, 127)) == {"one": 112, "sixteen": 112, "sixty-four": 64, "odd": 96}
    assert mirror.match(SPACE, run_of(1, 47)) == {"one": 32, "sixteen": 32}
    assert mirror.insert(SPACE, run_of(2, 63), "sixty-four") == 0


def test_forget_cuts_the_engine_and_its_branches_and_nobody_else(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    stem = run_of(1, 64)
    for tail in (2, 3):
        for engine in ("a", "b"):
            mirror.insert(SPACE, stem + run_of(tail, 32), engine)
    mirror.insert(SPACE, run_of(1, 16) + run_of(4, 32), "a")
    mirror.forget(SPACE, stem + run_of(2, 32), "a", keep_tokens=40)
    assert mirror.match(SPACE, stem + run_of(2, 32)) == {"a": 32, "b": 96}
    assert mirror.match(SPACE, stem + run_of(3, 32)) == {"a": 32, "b": 96}
    assert mirror.match(SPACE, run_of(1, 16) + run_of(4, 32)) == {"a": 48, "b": 16}
    mirror.forget(SPACE, stem, "a", keep_tokens=0)
    assert mirror.match(SPACE, run_of(1, 16) + run_of(4, 32)) == {"b": 16}
    mirror.forget(SPACE, stem, "nobody", keep_tokens=0)


def test_clear_engine_keeps_the_engine(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    mirror.insert(SPACE, run_of(1, 64), "a")
    mirror.insert(SPACE, run_of(1, 64), "b")
    assert mirror.clear_engine("a") is not None
    assert mirror.match(SPACE, run_of(1, 64)) == {"b": 64}
    assert mirror.insert(SPACE, run_of(1, 32), "a") == 2
    assert mirror.match(SPACE, run_of(1, 64)) == {"a": 32, "b": 64}
    assert mirror.clear_engine("nobody") is None


def test_versions_expire_per_owner_and_stay_expired(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    spaces = [SPACE._replace(version=version) for version in range(4)]
    shared = SPACE._replace(owner="pool", version=1)
    for space in [*spaces, shared]:
        mirror.insert(space, run_of(1, 32), "a")
    assert mirror.advance_version("run", 3, ttl_versions=1) == 2
    assert [bool(mirror.match(space, run_of(1, 32))) for space in spaces] == [False, False, True, True]
    assert mirror.match(shared, run_of(1, 32)) == {"a": 32}
    assert mirror.insert(spaces[1], run_of(1, 32), "a") == 0  # a late answer of an old version
    assert mirror.match(spaces[1], run_of(1, 32)) == {}
    mirror.advance_version("run", 2)  # late news moves nothing back
    assert mirror.insert(spaces[1], run_of(1, 32), "a") == 0
    assert mirror.drop_owner("run") == 2
    assert mirror.insert(spaces[0], run_of(1, 32), "a") == 2  # the owner's name is free again
    assert mirror.match(spaces[2], run_of(1, 32)) == {}


def test_a_partial_descent_gets_only_its_part() -> None:
    for mirror in (PrefixIndex(UNBOUNDED, page_tokens=1), NaivePrefixIndex(page_tokens=1)):
        mirror.add_engine("a", 1)
        mirror.insert(SPACE, ids(range(512)), "a")
        assert mirror.match(SPACE, ids([*range(100), 7, 7, 7])) == {"a": 100}
        assert mirror.match(SPACE, ids(range(100))) == {"a": 100}
        assert mirror.match(SPACE, ids(range(512))) == {"a": 512}
        assert mirror.match(SPACE, ids(range(600))) == {"a": 512}
        assert mirror.match(SPACE, b"") == {}


def test_an_unknown_engine_is_ignored_and_pools_are_apart(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    other = SPACE._replace(model="other")
    mirror.insert(SPACE, run_of(1, 32), "a")
    mirror.insert(other, run_of(1, 32), "b")
    assert mirror.match(SPACE, run_of(1, 32)) == {"a": 32}
    assert mirror.match(other, run_of(1, 32)) == {"b": 32}
    assert mirror.insert(SPACE, run_of(1, 32), "nobody") == 0
    assert mirror.drop_engine("nobody") is False
    assert mirror.match(SPACE._replace(owner="someone"), run_of(1, 32)) == {}


def test_namespaces_are_tuples_not_text(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.insert(Namespace("run", "a", "", 1, "23"), run_of(1, 32), "a")
    for space in (
        Namespace("run", "a", "", 12, "3"),
        Namespace("run", "", "a", 1, "23"),
        Namespace("runa", "", "", 1, "23"),
        Namespace("run", "a", "", 1, "2"),
    ):
        assert mirror.match(space, run_of(1, 32)) == {}
    assert mirror.match(Namespace("run", "a", "", 1, "23"), run_of(1, 32)) == {"a": 32}


def test_equal_text_is_not_equal_tokens(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.insert(SPACE, ids([5, 6] * 16), "a")
    assert mirror.match(SPACE, ids([56] * 32)) == {}
