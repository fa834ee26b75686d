"""Addresses have one form, a wrong one is told at once, and near servers never ask a proxy."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import grpc
import pytest
from tests.fakes.sdk_fake_server import FakeServer
from tests.unit.sdk.test_cli import invoke

import tinsmith
from tinsmith.addresses import is_near, normalize_address, proxy_of
from tinsmith.checkpoints.files import opener_for
from tinsmith.errors import ConfigurationError, UnavailableError
from tinsmith.rpc.channels import CHANNEL_OPTIONS, open_channel
from tinsmith.rpc.error_codec import decode_rpc_error
from tinsmith.settings import resolve_settings

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("gpu1:7377", "gpu1:7377"),
        (" gpu1:7377\n", "gpu1:7377"),
        ("gpu1:7377/", "gpu1:7377"),
        ("http://gpu1:7377/", "gpu1:7377"),
        ("HTTP://gpu1:7377//", "gpu1:7377"),
        ("http://gpu1", "gpu1:80"),
        ("https://gpu1.example.org/", "https://gpu1.example.org"),
        ("https://gpu1:7377/", "https://gpu1:7377"),
        ("[::1]:7377", "[::1]:7377"),
    ],
)
def test_an_address_is_kept_in_one_form(written: str, kept: str) -> None:
    assert normalize_address(written) == kept
    assert normalize_address(kept) == kept
    assert resolve_settings(api_key="tsk_a", environ={"TINSMITH_ADDRESS": written}).address == kept


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("gpu1", "has no port"),
        ("gpu1:", "has no port"),
        ("gpu1:x", "has no port"),
        ("gpu1:99999", "has no port"),
        ("gpu1:0", "has no port"),
        ("https://", "names no host"),
        (":7377", "names no host"),
        ("gpu 1:7377", "names no host"),
        ("http://gpu1:7377/v1", "has a path"),
        ("ftp://gpu1:7377", "of no kind that is known"),
        ("::1:7377", "not told from its port"),
        ("http://me:secret@gpu1:7377", "holds a user or a password"),
    ],
)
def test_a_wrong_address_is_told_at_once(
    written: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", written)
    monkeypatch.setenv("TINSMITH_API_KEY", "tsk_a")
    assert invoke("runs", "list") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: TINSMITH_ADDRESS ")
    assert told in line
    assert "secret" not in line


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "ALL_PROXY"])
def test_a_server_of_this_machine_is_reached_past_a_proxy(
    server: FakeServer, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, NOBODY)
    patience = tinsmith.RetryPolicy(budget_s=0)
    with tinsmith.Client(f" http://{server.address}/ ", "tsk_test", retry=patience) as client:
        assert client.address == server.address


def test_channels_between_pods_never_ask_a_proxy_and_those_of_clients_do_for_far_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[tuple[str, object], ...]] = []

    def remember(address: str, options: tuple[tuple[str, object], ...]) -> object:
        opened.append(options)
        return _Calls()

    monkeypatch.setattr(grpc.aio, "insecure_channel", remember)
    open_channel("gpu1:1")
    open_channel("localhost:1", may_use_proxy=True)
    open_channel("tinsmith-gateway.train.svc:1", may_use_proxy=True)
    open_channel("gpu1:1", may_use_proxy=True)
    asked = [dict(options)["grpc.enable_http_proxy"] for options in opened]
    assert asked == [0, 0, 0, 1]
    assert dict(CHANNEL_OPTIONS)["grpc.enable_http_proxy"] == 0


def test_a_download_from_a_store_of_this_machine_asks_no_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", NOBODY)
    near, far = opener_for("http://127.0.0.1:9000/a?b=c"), opener_for("http://store.example.org/a")
    assert "ProxyHandler" not in {type(each).__name__ for each in near.handlers}
    assert "ProxyHandler" in {type(each).__name__ for each in far.handlers}


def test_the_proxy_is_named_where_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "failed to connect to all addresses; last error: UNKNOWN: refused",
    )
    error = decode_rpc_error(failed, address="gpu1:7377")
    assert isinstance(error, UnavailableError)
    assert error.message == (
        "no server answers at gpu1:7377 through https_proxy=proxy:3128: refused; if it is reached"
        " directly, export no_proxy=gpu1"
    )
    assert "proxy" not in decode_rpc_error(failed, address="127.0.0.1:7377").message


def test_a_pod_that_is_away_is_named_with_the_address_that_the_user_gave() -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
    )
    server, pod = "127.0.0.1:7077", "127.0.0.1:38287"
    told = decode_rpc_error(failed, address=pod, server=server).message
    assert told == f"no server answers at {server} (its pod {pod}): Connection refused"
    told = decode_rpc_error(failed, address=server, server=server).message
    assert told == f"no server answers at {server}: Connection refused"


def test_what_is_exempt_has_no_proxy() -> None:
    proxied = {"http_proxy": NOBODY, "no_proxy": "localhost, .example.org,gpu2"}
    assert proxy_of("gpu1:1", proxied) == ("http_proxy", NOBODY)
    assert proxy_of("https://a.example.org", proxied) is None
    assert proxy_of("gpu2:1", proxied) is None
    assert proxy_of("gpu1:1", {"HTTP_PROXY": NOBODY}) is None
    for near in ("localhost:1", "127.0.0.9:1", "https://[::1]:1", "gateway.a.svc.cluster.local:1"):
        assert is_near(near)
        assert proxy_of(near, {"http_proxy": NOBODY}) is None


def test_letters_that_a_terminal_does_not_have_are_no_crash(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", server.address)
    monkeypatch.setenv("TINSMITH_API_KEY", "tsk_test")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    err = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    typed = io.TextIOWrapper(io.BytesIO("é\n".encode()), encoding="ascii")
    for name, stream in (("stdout", out), ("stderr", err), ("stdin", typed)):
        monkeypatch.setattr(sys, name, stream)
    assert invoke("jobs", "submit", str(tmp_path / "schön.yaml")) == 1
    err.flush()
    assert b"sch\\xf6n.yaml cannot be read" in _written(err)
    sys.stdout.write("é →\n")
    out.flush()
    assert b"\\xe9 \\u2192" in _written(out)
    assert sys.stdin.readline() == "é\n"


def _written(stream: io.TextIOWrapper) -> bytes:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue()


class _Calls:
    """What has the four kinds of calls and makes none."""

    unary_unary = unary_stream = stream_unary = stream_stream = None


def test_an_address_that_is_given_is_named_as_such() -> None:
    with pytest.raises(ConfigurationError, match=r"the address is 'gpu1', which has no port"):
        resolve_settings(address="gpu1", api_key="tsk_a", environ={})
