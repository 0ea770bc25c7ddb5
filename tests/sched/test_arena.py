from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.kernels.run.board import BOARD_ALIGNMENT
from flowrt.sched.host.arena import ALIGNMENT, MANY, MANY_LINES, aligned, lay_out, local_room

lifetimes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 40), st.integers(0, 12)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=60,
)


def most_alive(lives: list[tuple[int, int, int]]) -> int:
    """The most bytes alive at one moment, each value rounded up to `ALIGNMENT`: no layout can need less."""
    moments = {first for _, first, _ in lives}
    return max((sum(aligned(n) for n, first, last in lives if first <= t <= last) for t in moments), default=0)


@given(lifetimes)
def test_values_alive_together_never_share_a_byte(lives: list[tuple[int, int, int]]) -> None:
    offsets, total = lay_out(lives)
    for i, (size, first, last) in enumerate(lives):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] >= 0
        assert offsets[i] + size <= total or not size
        for j, (other, begin, end) in enumerate(lives[:i]):
            if first <= end and begin <= last and size and other:
                assert offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]


@given(lifetimes)
def test_a_layout_needs_at_least_what_is_alive_and_at_most_the_sum(lives: list[tuple[int, int, int]]) -> None:
    _, total = lay_out(lives)
    assert most_alive(lives) <= total <= sum(aligned(size) for size, _, _ in lives)


def test_a_chain_needs_two_places() -> None:
    chain = [(1000, i, i + 1) for i in range(100)]
    assert lay_out(chain)[1] == most_alive(chain) == 2 * 1024


def test_forward_and_backward_values_come_close_to_the_lower_bound() -> None:
    """Activations live until their gradient is computed, in reverse; gradients live for a step."""
    layers = 30
    lives = [(64 * (7 + 13 * i % 29), i, 2 * layers - i) for i in range(layers)]
    lives += [(64 * (5 + 11 * i % 23), 2 * layers - i, 2 * layers - i + 1) for i in range(layers)]
    assert lay_out(lives)[1] <= 1.1 * most_alive(lives)


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_small_values_are_laid_out_at_once_and_take_no_more_than_they_must(seed: int) -> None:
    rng = random.Random(seed)
    firsts = [rng.randrange(3000) for _ in range(3000)]
    lives = [(rng.choice([1, 4, 64]), first, first + rng.randrange(40)) for first in firsts]
    offsets, total = lay_out(lives)
    assert total == most_alive(lives)
    alive: dict[int, int] = {}  # line → when it is free
    for number in sorted(range(len(lives)), key=lambda number: lives[number][1]):
        _, first, last = lives[number]
        assert alive.get(offsets[number], -1) < first, f"seed {seed}"
        alive[offsets[number]] = last
    mixed = [*lives, *((1000, first, first + 3) for first in range(0, 3000, 50))]
    offsets, total = lay_out(mixed)
    assert most_alive(mixed) <= total <= most_alive(lives) + most_alive(mixed[len(lives) :])


@pytest.mark.parametrize(
    ("lines", "others", "behind"),
    [
        (MANY_LINES, 0, 0),
        (MANY_LINES + 1, 0, 64),
        (0, MANY_LINES + 1, 0),
        (MANY, MANY_LINES + 1, 64),  # lines are no reason to lay others apart
        (0, MANY, 128),
    ],
)
def test_gaps_are_looked_for_unless_so_many_would_take_too_long(lines: int, others: int, behind: int) -> None:
    """Of a large value and then others one at a time, which fit in its place: who looks for none lies behind it."""
    lives = [(1024, 0, 0)]
    lives += [(size, i, i) for size, count in ((64, lines), (128, others)) for i in range(1, count + 1)]
    if lines and others:  # side by side in its place
        assert lay_out(lives[:1] + lives[1 + lines :])[1] == 1024
    assert lay_out(lives)[1] == 1024 + behind


def test_nothing_needs_nothing() -> None:
    assert lay_out([]) == ([], 0)
    assert lay_out([(0, 0, 3), (0, 1, 2)]) == ([0, 0], 0)


@pytest.mark.parametrize(("nbytes", "lines"), [(1, 1), (BOARD_ALIGNMENT, 1), (BOARD_ALIGNMENT + 1, 2), (1000, 8)])
def test_each_thread_has_lines_of_its_own_and_they_begin_where_a_line_does(nbytes: int, lines: int) -> None:
    assert local_room(nbytes, 3) == (3 * lines + 1) * BOARD_ALIGNMENT
    assert local_room(nbytes, 0) == local_room(0, 3) == 0
