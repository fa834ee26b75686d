"""Ctrl-C in the middle of a submit: no sequence number goes out twice, and none is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes.sdk_fake_server import FakeServer

import tinsmith
from tinsmith.rpc.event_loop_thread import BackgroundLoop

Data = list[tinsmith.Datum]


@pytest.mark.parametrize("is_handed_over", [True, False], ids=["after-handing-over", "before"])
def test_an_interrupted_submit_keeps_the_order_whole(
    server: FakeServer,
    run: tinsmith.TrainingRun,
    data: Data,
    monkeypatch: pytest.MonkeyPatch,
    is_handed_over: bool,
) -> None:
    post = BackgroundLoop.post

    def interrupted(loop: BackgroundLoop, callback: Callable[[], object]) -> None:
        monkeypatch.setattr(BackgroundLoop, "post", post)
        if is_handed_over:
            post(loop, callback)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundLoop, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.forward_backward(data)
    saved = run.save_state("after-the-interrupt")
    assert saved.sequence_number == 2
    assert saved.result(timeout=10).name.endswith("/checkpoints/after-the-interrupt")
    numbers = [request.sequence_number for _, request in server.state.requests]
    assert sorted(numbers) == [1, 2]
