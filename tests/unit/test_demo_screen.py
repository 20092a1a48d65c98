"""What a person sees of the demo, with and without a terminal."""

import io

from rich.console import Console

from peers.demo.follow import LossPoint, PeerStory
from peers.demo.screen import Screen, peer_table


def test_without_a_terminal_a_happening_is_one_plain_line() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, width=20), num_outer_steps=4, unigram_loss=3.2)

    with screen:
        screen.say("[peer-1] joined with the parameters of the seed")

    assert out.getvalue() == "   0.0 s  [peer-1] joined with the parameters of the seed\n"


def test_the_table_has_a_row_for_each_peer_with_its_numbers() -> None:
    story = PeerStory(
        "peer-1",
        state="training",
        outer_step=3,
        inner_step=31,
        tokens_per_second=1234.5,
        num_tokens=63488,
        curve=[LossPoint(31, 2.71828)],
        joined={"event": "joined"},
    )
    out = io.StringIO()

    Console(file=out, width=100).print(peer_table([story, PeerStory("peer-2")], title="now"))

    rows = [line.split() for line in out.getvalue().splitlines() if "peer-" in line]
    first, second = [[cell for cell in row if cell != "│"] for row in rows]
    assert first == ["peer-1", "training", "3", "31", "2.718", "1.23k", "63.5k"]
    assert second == ["peer-2", "starting"]
