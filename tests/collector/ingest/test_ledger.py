"""Number ranges against a plain set, and against the table they are read from."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet_collector.ledger import Ledger, Ranges
from gpufleet_collector.store import Store

NUMBERS = st.integers(0, 40) | st.integers(2**64 - 5, 2**64 - 1)


@given(numbers=st.lists(NUMBERS, max_size=60))
def test_ranges_are_the_set_of_what_was_added(numbers: list[int]) -> None:
    ranges, plain = Ranges(), set[int]()
    for number in numbers:
        assert (number in ranges) == (number in plain)
        ranges.add(number, number)
        plain.add(number)
    _same(ranges, plain)


@given(spans=st.lists(st.tuples(NUMBERS, st.integers(0, 6)), max_size=30))
def test_ranges_of_spans(spans: list[tuple[int, int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for start, length in spans:
        ranges.add(start, start + length)
        plain |= set(range(start, start + length + 1))
    _same(ranges, plain)


def _same(ranges: Ranges, plain: set[int]) -> None:
    assert {number for start, end in ranges for number in range(start, end + 1)} == plain
    edges = list(ranges)
    assert all(start <= end for start, end in edges)
    assert all(after > before + 1 for (_, before), (after, _) in pairwise(edges))
    assert all((number in ranges) == (number in plain) for number in [*range(50), *range(2**64 - 8, 2**64)])


@settings(max_examples=30, deadline=None)
@given(spools=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sets(NUMBERS, min_size=1), min_size=1))
def test_a_restart_reads_the_same_ranges_from_the_table(spools: dict[str, set[int]]) -> None:
    store = Store.open(None)
    before = Ledger()
    with store.transaction() as write:
        for spool, numbers in spools.items():
            for number in numbers:
                before.add("n", spool, number, "d" * 16)
                write.execute(
                    "INSERT INTO live.ledger VALUES ('n', ?, ?, ?, '', '2026-01-01', 0, 'live', 0)",
                    [spool, number, "d" * 16],
                )
    after = Ledger()
    with store.reader() as read:
        after.load(read)
        for spool, numbers in spools.items():
            probe = numbers | {number + 1 for number in numbers} | {0, 7}
            assert {n for n in probe if after.known("n", spool, n)} == numbers
            assert {n for n in probe if before.known("n", spool, n)} == numbers
            assert after.digest(read, "n", spool, min(numbers)) == "d" * 16
        assert not after.known("other", "a", 1)
    store.close()


def test_digests_of_old_numbers_are_looked_up_in_the_table() -> None:
    store = Store.open(None)
    ledger = Ledger()
    with store.reader() as read:
        for number in range(1000):
            ledger.add("n", "s", number, f"{number:016x}")
        assert ledger.digest(read, "n", "s", 999) == f"{999:016x}"
        assert ledger.known("n", "s", 3)
        assert ledger.digest(read, "n", "s", 3) is None
    store.close()
