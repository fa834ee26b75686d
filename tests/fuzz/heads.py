"""HTTP heads that are wrong on purpose, as bytes of a connection."""

from __future__ import annotations

import random

_METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE", "get"]
_METHODS += ["PRI", "X" * 50, "", "G\x00T", "PROPFIND"]
_TARGETS = [
    *(
        "/",
        "*",
        "//",
        "/api/v1",
        "/api/v1/",
        "/api/v1/healthz",
        "/api/v1/../healthz",
        "/%00",
        "/%ff",
    ),
    *("/api/v1/sessions/%2e%2e", "/api/v1/sessions/a%2fb", "/api/v1/training_runs/%00/checkpoints"),
    *("/api/v1/samplers/" + "x" * 5000, "/api/v1/sessions?limit=-1", "/api/v1/sessions?limit=x"),
    *("/api/v1/sessions?limit=99999999999999999999", "/api/v1/sessions?offset=%F0%9F%A7%A8"),
    *(
        "/api/v1/checkpoints?limit=1&limit=a",
        "/api/v1/training_runs/a:train:1/checkpoints/weights/x",
    ),
    *("/api/v1/training_runs/a/checkpoints/weights/x/ttl", "/api/v1/downloads/x", "/metrics"),
    *("/api/v1/downloads/traces/x", "/api/v1/downloads/e30=.x", "/api/v1/downloads/%ff.%ff"),
    *("/api/v1/audit?day=9999-12-31", "/api/v1/audit?day=0001-01-01", "/api/v1/audit?day=x"),
    *(
        "/api/v1/audit?day=-1",
        "/api/v1/audit?event_type=%00",
        "http://[/x",
        "http://x:y/api/v1/audit",
    ),
    *(
        "/api/v1/billing/usage/events?starting_on=0001-01-01T00:00:00%2B23:59&ending_before=x",
        "/api/v1/billing/usage/events?starting_on=9999-12-31T00:00:00Z&ending_before=9999-12-31T01:00Z",
        "/api/v1/billing/usage/events?starting_on=0001-01-01&ending_before=0001-01-02",
        "/api/v1/billing/usage/checkpoints/current?project_id=%00",
        "/api/v1/sessions/é/trace_export",
        "/\xff\xfe",
    ),
]
_LINES = [
    *(
        "Content-Length: 5",
        "Content-Length: -1",
        "Content-Length: 99999999999999999999",
        "X: " + "y" * 900,
    ),
    *(
        "Content-Length: x",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Host: [",
        "Host:",
    ),
    *(
        "Host: a\x00b",
        "Host: é",
        "Host: a:b:c",
        "Host: x:99999",
        "Expect: 100-continue",
        "Upgrade: websocket",
    ),
    *(
        "Connection: upgrade",
        "Connection: close",
        "X-API-Key: ",
        "X-API-Key: é\xff",
        "X-API-Key: \x01",
    ),
    *("Authorization: Bearer", "Authorization: Basic eDp5", "Authorization: Bearer " + "k" * 5000),
    *(
        "Authorization: bearer tse-x_y",
        "X-API-Key: tml-x",
        "X-API-Key: eyJ.a.b",
        "no colon at all",
        ": x",
    ),
    *(
        " folded",
        "Accept: */*",
        "Content-Encoding: zstd",
        "Content-Encoding: gzip",
        "Range: bytes=0-",
    ),
    *("X-Idempotency-Key: \xff\xfe", "Traceparent: x", "Cookie: " + "a" * 70_000, "Upgrade: h2c"),
]
_BODIES = [b"", b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffff\r\n", b"\x00" * 50, b"hello"]


def hostile_request(key: str, chance: random.Random) -> bytes:
    """Return the bytes of one request, with a good key half of the time."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.randint(1, 400))
    if chance.random() < 0.05:
        # HTTP/2, which does not go on as it begins.
        return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(chance.randint(0, 60))
    version = chance.choice(["HTTP/1.1"] * 20 + ["HTTP/1.0", "HTTP/9.9", "", "HTTP/1.1 x"])
    lines = [f"{chance.choice(_METHODS[:2] * 12 + _METHODS)} {chance.choice(_TARGETS)} {version}"]
    if chance.random() < 0.7:
        lines.append("Host: localhost")
    if chance.random() < 0.5:
        lines.append(f"X-API-Key: {key}")
    lines += chance.sample(_LINES, chance.choice([0, 0, 1, 1, 1, 2, 4]))
    chance.shuffle(lines[1:])
    end = chance.choice(["\r\n"] * 9 + ["\n"])
    head = end.join([*lines, "", ""]).encode(
        "utf-8" if chance.random() < 0.5 else "latin-1", "replace"
    )
    # What follows a head that announces nothing is the next request.
    body = chance.choice(_BODIES) if chance.random() < 0.2 else b""
    return head + body
