"""How the command line shows an episode: what the model said apart, and nothing that it obeys."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.cli.masked_text import masked_lines, visible
from tinsmith.cli.rollouts import describe_replay
from tinsmith.rollouts.records import EpisodeRecord, Origin, RecordedImage, RecordedTurn, Replay
from tinsmith.rollouts.records.replaying import Played, compare

RECORD = EpisodeRecord(
    episode="0/0/0/0",
    origin=Origin(),
    reason="done",
    turns=(RecordedTurn(num_tokens=2, stop_reason="stop", reward=1.0),),
    tokens=[1, 2, 3, 4],
    texts=["Say", "\n", "tin", "."],
    mask=[0, 0, 1, 1],
    logprobs=[0.0, 0.0, -0.5, -0.25],
    advantages=[0.0, 0.0, 1.0, 1.0],
    versions=[-1, -1, 3, 3],
    turn_indices=[-1, -1, 0, 0],
)


def test_what_was_said_is_in_brackets_or_coloured() -> None:
    assert list(masked_lines(RECORD, coloured=False)) == ["Say", "[tin.]"]
    assert list(masked_lines(RECORD, coloured=True)) == ["Say", "\x1b[32mtin.\x1b[0m"]


def test_images_stand_for_their_placeholders_and_samples_are_apart() -> None:
    image = RecordedImage(position=0, num_tokens=2, format="png", sha256="", width=28, height=56)
    record = replace(RECORD, images=(image,), sample_starts=(0, 2))
    assert list(masked_lines(record, coloured=False)) == [
        "--- sample 1 of 2 ---",
        "<png 28x56, 2 tokens>",
        "--- sample 2 of 2 ---",
        "[tin.]",
    ]


@given(texts=st.lists(st.tuples(st.text(max_size=12), st.booleans()), max_size=8))
def test_lines_are_narrow_and_hold_all_that_was_said(texts: list[tuple[str, bool]]) -> None:
    record = replace(
        RECORD,
        tokens=list(range(len(texts))),
        texts=[text for text, _ in texts],
        mask=[int(said) for _, said in texts],
    )
    plain = list(masked_lines(record, coloured=True, width=10))
    bare = [re.sub(r"\x1b\[\d+m", "", line) for line in plain]
    assert all(len(line) <= 10 or any(ord(c) > 0x2FF for c in line) for line in bare)
    assert all("\x1b" not in line for line in bare)
    whole = "".join(visible(text) for text, _ in texts)
    assert "".join(bare) == whole.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[2J", "\u241b[2J"), ("a\rb", "a\u240db"), ("\x7f", "\u2421"), ("\x9b", "<9b>")],
)
def test_control_characters_are_pictures(text: str, shown: str) -> None:
    assert visible(text) == shown


def replayed(tokens: list[int], logprobs: list[float], version: int = 3) -> Replay:
    versions = [-1, -1, *[version] * (len(tokens) - 2)]
    mask = [0, 0, *[1] * (len(tokens) - 2)]
    return compare(RECORD, Played(tokens, mask, logprobs, versions))


@pytest.mark.parametrize(
    ("replay", "said"),
    [
        pytest.param(
            replayed([1, 2, 3, 4], [0, 0, -0.5, -0.25]),
            "same: 4 tokens, and the bits of their log-probabilities",
            id="bits",
        ),
        pytest.param(
            replayed([1, 2, 3, 4], [0, 0, -0.5, -0.5]),
            "same: 4 tokens; 1 log-probabilities differ, by at most 0.25",
            id="tokens",
        ),
        pytest.param(
            replayed([1, 2, 3, 9], [0, 0, -0.5, -0.25], version=4),
            "different from token 3 of 4 on: token 4 in the record, token 9 now|weights differ: "
            "version 3 in the record, version 4 now; give --checkpoint of the same version|"
            "bits are fast on this server, so that a draw may fall otherwise",
            id="version",
        ),
        pytest.param(
            replayed([1, 2, 3], [0, 0, -0.5]),
            "different from token 3 of 4 on: token 4 in the record, the end now|"
            "bits are fast on this server, so that a draw may fall otherwise",
            id="shorter",
        ),
        pytest.param(
            replayed([1, 7, 3, 4], [0, 0, -0.5, -0.25]),
            "different from token 1 of 4 on: token 2 in the record, token 7 now|the environment "
            "showed something else there: it does not keep to its seed|"
            "bits are fast on this server, so that a draw may fall otherwise",
            id="environment",
        ),
    ],
)
def test_a_replay_is_told_in_sentences(replay: Replay, said: str) -> None:
    assert "|".join(describe_replay(RECORD, replay, "fast")) == said
