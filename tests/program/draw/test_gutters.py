"""Gutters: segments that touch have different tracks, and vertical segments at one position do not overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphwright.program.draw.arrange import LANE, Wire, XPosition, gutter_tracks


def wire(net: int, above: int, below: int) -> Wire:
    return Wire(net, 0, [XPosition(LANE, above, 0), XPosition(LANE, below, 0)], [(0, 0)])


def tracks(wires: list[Wire]) -> dict[int, int]:
    gutter_tracks(wires, 2, lambda x: x.a)
    return {w.net: w.bends[0][1] for w in wires}


def test_wires_that_start_and_end_at_one_position_do_not_cross() -> None:
    found = tracks([wire(0, 0, 6), wire(1, 10, 5), wire(2, 20, 10)])
    assert found == {0: 0, 1: 1, 2: 2}, "track 0 would be free for net 2, but net 1 comes down there"


def test_wires_of_one_net_and_distant_wires_share_a_track() -> None:
    assert tracks([wire(0, 0, 3), wire(0, 0, 5), wire(1, 6, 9)]) == {0: 0, 1: 0}


def test_cyclic_track_constraints_are_broken() -> None:
    assert sorted(tracks([wire(0, 0, 1), wire(1, 1, 0)]).values()) == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25))
def test_segments_on_one_track_do_not_touch(ends: list[tuple[int, int]]) -> None:
    found = tracks([wire(net, a, b) for net, (a, b) in enumerate(ends)])
    for n, (a, b) in enumerate(ends):
        for m, (c, d) in enumerate(ends[:n]):
            if found[n] == found[m]:
                assert max(a, b) < min(c, d) or max(c, d) < min(a, b)
