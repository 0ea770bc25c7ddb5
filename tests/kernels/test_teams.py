"""How threads of a CUDA block stand that reduce together: wide enough for the entries, and in enough blocks."""

from __future__ import annotations

import pytest

from flowrt.kernels.language.twin import THREADS
from flowrt.kernels.teams.standing import BUSY, FEWEST, MOST, NEIGHBOURS, teams_for


@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("count", [0, 1, 10, 64, 1000, 100_000])
@pytest.mark.parametrize("results", [0, 1, 10, 1024])
def test_teams_divide_a_block_evenly_and_parts_are_worth_their_threads(results: int, count: int, along: bool) -> None:
    teams = teams_for(results, count, along=along)
    assert teams.width & (teams.width - 1) == 0
    assert THREADS % (teams.width * (1 if along else teams.apart)) == 0
    assert teams.parts == 1 or count >= teams.parts * teams.width * FEWEST


def test_a_short_row_has_few_threads_and_a_long_one_a_block() -> None:
    assert [teams_for(1000, n, along=True).width for n in (1, 10, 64, 10_000)] == [1, 2, 16, THREADS]


def test_neighbours_that_come_to_results_side_by_side_are_read_together() -> None:
    teams = teams_for(1024, 10_000, along=False)
    assert teams.apart == NEIGHBOURS
    assert teams.width == THREADS // NEIGHBOURS


def test_long_rows_are_cut_into_parts_until_a_gpu_is_busy() -> None:
    assert teams_for(1, THREADS * MOST, along=True).parts == 1
    few = teams_for(1, 4 * THREADS * MOST, along=True).parts
    assert 1 < few < BUSY
    assert teams_for(1, 1 << 30, along=True).parts == BUSY
    assert teams_for(BUSY, 1 << 20, along=True).parts == 1


def test_each_line_has_a_team() -> None:
    for lines in (0, 1, 127, 128, 129):
        teams = teams_for(lines, 10, along=True)
        assert teams.blocks(lines) * (THREADS // teams.width) >= lines
    assert teams_for(0, 10, along=True).blocks(0) == 0
