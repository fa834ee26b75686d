"""Where the pairs of token and expert lie, and which of them form a group."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith_engine.packing.moe_routing import Dispatch, group_length

NUM_EXPERTS, NUM_CHOSEN, NUM_ROWS = 6, 2, 64


@pytest.fixture
def tokens() -> np.ndarray:
    """Two runs of 32 rows, each with filling at its end."""
    return np.concatenate([np.arange(0, 21), np.arange(32, 59)])


@pytest.fixture
def dispatch(tokens: np.ndarray) -> Dispatch:
    generator = torch.Generator().manual_seed(1)
    # Expert 4 gets nothing.
    scores = torch.rand(NUM_ROWS, NUM_EXPERTS, generator=generator)
    scores[:, 4] = -1.0
    return Dispatch.of(scores.topk(NUM_CHOSEN).indices, tokens, NUM_EXPERTS, 16)


def test_each_pair_has_a_row_in_the_block_of_its_expert(
    dispatch: Dispatch, tokens: np.ndarray
) -> None:
    places = dispatch.places_TK[: len(tokens)].numpy()
    assert len(np.unique(places)) == places.size
    blocks = dict(dispatch.blocks)
    assert 4 not in blocks
    assert all(rows.start % 16 == rows.stop % 16 == 0 for rows in blocks.values())
    for token, experts, rows in zip(tokens, dispatch.experts_TK, places, strict=True):
        for expert, row in zip(experts, rows, strict=True):
            assert blocks[expert].start <= row < blocks[expert].stop
            assert dispatch.sources_M[row] == token
    filled = set(range(len(dispatch.sources_M))) - set(places.ravel().tolist())
    assert filled == set(dispatch.filling.tolist())


def test_filling_neither_gives_nor_takes(dispatch: Dispatch, tokens: np.ndarray) -> None:
    rows = torch.randn(NUM_ROWS, 16)
    assert not dispatch.spread_gradient(rows)[dispatch.filling].any()
    spread = torch.ones(len(dispatch.sources_M), 16)
    spread[dispatch.filling] = float("nan")
    gathered = dispatch.gathered(spread, NUM_ROWS)
    is_token = np.isin(np.arange(NUM_ROWS), tokens)
    assert (gathered[torch.from_numpy(is_token)] == NUM_CHOSEN).all()
    assert not gathered[torch.from_numpy(~is_token)].any()


@pytest.mark.parametrize("shortest", [4, 8, 16])
@pytest.mark.parametrize("are_tiled", [False, True])
def test_groups_hold_the_tokens_of_one_run_and_expert(
    dispatch: Dispatch, tokens: np.ndarray, shortest: int, *, are_tiled: bool
) -> None:
    batches = dispatch.groups(
        slice(0, NUM_ROWS), 2, NUM_EXPERTS, shortest=shortest, are_tiled=are_tiled
    )
    numbers = torch.arange(len(dispatch.sources_M))
    written = torch.zeros(len(numbers))
    for batch in batches:
        assert batch.length == shortest if are_tiled else batch.length % shortest == 0
        batch.add_to_(written[:, None], torch.ones(len(batch.runs), batch.length, 1))
        for run, expert, rows in zip(
            batch.runs.tolist(), batch.experts.tolist(), batch.spread(numbers), strict=True
        ):
            block = dict(dispatch.blocks)[expert]
            assert ((rows >= block.start) & (rows < block.stop)).all()
            assert (dispatch.sources_M[rows] // 32 == run).all()
    wanted = torch.ones(len(numbers))
    wanted[dispatch.filling] = 0.0
    assert torch.equal(written, wanted)


def test_no_batch_has_one_group(dispatch: Dispatch) -> None:
    assert all(len(b.runs) > 1 for b in dispatch.groups(slice(0, 32), 1, NUM_EXPERTS, shortest=4))


@pytest.mark.parametrize("shortest", [4, 8, 16])
def test_lengths_waste_little(shortest: int) -> None:
    for num_rows in range(1, 3000):
        length = group_length(num_rows, shortest)
        assert num_rows <= length <= max(shortest, num_rows + 15, 1.25 * num_rows + 1)
        assert length % shortest == 0
