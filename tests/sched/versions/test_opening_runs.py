"""What is decided before a run begins, by what every server says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from flowrt.sched.versions.opening import Apply, End, Go, Going, Left, Refuse, Said, decide

HERE, BACK, NONE = Left(7, 57, frozenset({(0, 57), (1, 57), (2, 57)})), Left(7, 58), None
ORDER = replace(HERE, order=(57, (0, 2)))
FIX = "go back to a checkpoint by session.restore(), or, to begin anew, forget all variables by session.reset()"


def opening(*said: tuple[int | None, Left | None]) -> object:
    return decide("trainer 'digits'", [Said(f"ps:{server}", *one) for server, one in enumerate(said)])


def test_servers_at_one_version_go_on_from_it() -> None:
    assert opening((0, NONE), (0, NONE)) == Go(0)
    assert opening((None, NONE), (None, NONE)) == Go(0)
    assert opening((58, replace(BACK, order=None)), (58, BACK)) == Go(58)
    assert opening((57, ORDER), (57, HERE)) == Go(57)
    assert opening((57, NONE)) == Go(57)


def test_after_a_checkpoint_was_restored_the_variables_count_and_not_what_is_left() -> None:
    assert opening((50, ORDER), (50, BACK)) == Go(50)
    assert opening((50, ORDER), (50, NONE)) == Go(50)


def test_servers_that_are_behind_apply_what_was_ordered() -> None:
    assert opening((57, ORDER), (58, BACK)) == Apply(7, 57, (0, 2), (0,))
    ahead = replace(BACK, order=(57, (0, 2)))
    assert opening((58, ahead), (57, HERE), (58, BACK), (57, HERE)) == Apply(7, 57, (0, 2), (1, 3))
    weighted = replace(ORDER, weights=(0.5, 0.25))
    assert opening((57, weighted), (58, BACK)) == Apply(7, 57, (0, 2), (0,), (0.5, 0.25))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((57, HERE), (58, BACK)),  # nobody knows the set
        ((57, NONE), (58, BACK)),
        ((57, ORDER), (58, NONE)),
        ((58, replace(BACK, order=(57, (0, 2)))), (57, NONE)),
        ((58, replace(BACK, order=(57, (0, 3)))), (57, HERE)),  # it does not hold what was ordered
        ((58, replace(BACK, order=(56, (0, 2)))), (57, HERE)),
        ((57, ORDER), (58, replace(BACK, run=6))),
        ((57, ORDER), (58, replace(BACK, version=57))),
        ((57, ORDER), (59, replace(BACK, version=59))),
        ((57, replace(ORDER, version=56)), (58, BACK)),
        ((0, Left(7, 0)), (1, Left(7, 1))),
    ],
)
def test_servers_that_nothing_can_bring_to_one_version_are_refused(
    first: tuple[int, Left | None], second: tuple[int, Left | None]
) -> None:
    where = f"ps:0 at {first[0]}, ps:1 at {second[0]}"
    text = f"the parameter servers of trainer 'digits' are not at one version: {where}; {FIX}"
    assert opening(first, second) == Refuse(text)


@pytest.mark.parametrize("version", [0, None])
def test_a_server_that_is_back_without_its_state_is_noticed(version: int | None) -> None:
    assert opening((58, BACK), (version, NONE), (58, BACK)) == Refuse(
        "the parameter servers of trainer 'digits' are not at one version: ps:0 at 58, ps:1 at none "
        f"(nothing is left of what it held; was it started again?), ps:2 at 58; {FIX}"
    )
    assert isinstance(opening((1, Left(7, 1)), (version, NONE)), Refuse)


def test_one_client_at_a_time_drives() -> None:
    driven = replace(ORDER, ended=False, client="session 'digits.py' of a1, since 12:04:10")
    expected = Refuse(
        "trainer 'digits' is being trained by session 'digits.py' of a1, since 12:04:10, and one client at a time "
        "trains it: wait until that one ends, or end it"
    )
    assert opening((57, driven), (58, replace(BACK, ended=False))) == expected
    assert opening((57, NONE), (57, driven)) == End(7, server=1)


def test_a_run_whose_client_is_gone_is_ended_first() -> None:
    gone = replace(ORDER, ended=False)
    assert opening((57, gone), (58, replace(BACK, ended=False))) == End(7, server=0)
    assert opening((57, ORDER), (57, NONE), (57, Left(3, 57, ended=False))) == End(3, server=2)


def test_an_update_that_went_only_partly_into_the_variables_is_not_trained_on() -> None:
    broke = replace(HERE, broke=True)
    assert opening((57, ORDER), (57, broke), (57, broke)) == Refuse(
        f"trainer 'digits': an update could not be applied whole on ps:1, ps:2; {FIX}"
    )
    assert opening((50, ORDER), (50, broke)) == Go(50)


def test_a_detached_run_is_attached_to_by_its_session_and_others_are_told_of_it() -> None:
    alone = replace(HERE, ended=False, client="host:1", detached="me")
    said = [Said("ps:0", 57, alone), Said("ps:1", 57, replace(HERE, ended=False))]
    assert decide("trainer", said, "me") == Going(7)
    for name in ("", "another"):
        refused = decide("trainer", said, name)
        assert isinstance(refused, Refuse)
        assert "attach to it from a session named 'me'" in refused.text
    attended = decide("trainer", [Said("ps:0", 57, replace(alone, detached=""))], "me")
    assert isinstance(attended, Refuse)
    assert "one client at a time" in attended.text
    assert opening((57, HERE), (57, replace(alone, server=1))) == End(7, 1), "what others say of clients does not count"


@dataclass(frozen=True)
class Told:
    version: int


def test_what_was_reported_to_nobody_goes_with_the_run_that_follows() -> None:
    told = {version: Told(version) for version in range(52, 58)}
    first = replace(HERE, unseen=(told[55], told[56]))
    assert opening((57, first), (57, HERE)) == Go(57, (told[55], told[56]))
    assert opening((50, first), (50, HERE)) == Go(50), "a checkpoint was restored since"


def test_where_server_0_is_lost_the_others_say_what_was_reported_to_nobody() -> None:
    told = {version: Told(version) for version in range(52, 58)}
    one = replace(HERE, server=1, unseen=(told[56], told[55]))
    two = replace(HERE, server=2, unseen=(told[57], told[56], told[54]))
    before = replace(HERE, server=3, run=6, unseen=(told[52],))
    assert opening((57, one), (57, two), (57, before), (57, NONE)) == Go(57, (told[54], told[55], told[56]))
