"""Training over links that are slow and break, and with clients that die; `scripts/faults` tries more, and longer."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from faults import FIRST, SMALL, cuts, killed_clients, partitions
from link_world import Weather

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("FLOWRT_SEED", 1122))
    print(f"seed {seed}")
    return random.Random(seed)


async def test_slow_links_in_odd_pieces_that_break_at_any_moment_change_no_bit(
    rng: random.Random, tmp_path: Path
) -> None:
    await cuts(replace(SMALL, steps=20), rng, tmp_path, 6, Weather(0.001, 0.002, pieces=200))


async def test_who_is_cut_off_for_a_while_goes_on_with_the_others_and_nothing_is_applied_twice(
    rng: random.Random, tmp_path: Path
) -> None:
    await partitions(FIRST, rng, tmp_path, longest=1.0)


async def test_clients_that_die_at_any_moment_leave_all_servers_at_one_version(
    rng: random.Random, tmp_path: Path
) -> None:
    await killed_clients(rng, tmp_path, rounds=2, ahead=20)
