"""Sends hostile requests to a gateway and looks whether it stays whole.

What must hold: no request ends a connection without an answer. A user's mistake is never a 5xx,
and every refusal says in JSON what was wrong. A refused call has used up its number and nothing
else. Training goes on: that of the attacker, and that of a neighbour to the bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.fuzz import batches, heads, words
from tests.fuzz.tally import Tally

PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
_NUM_WORKERS = 8
_STEPS = 3
_HEARTBEAT_S = 10.0
_HEAD_TIMEOUT_S = 10.0
# These are no answers of the wire: nothing was asked, or HTTP/2 was spoken.
_NO_ANSWER = ("no answer", "HTTP/2")


def look(tally: Tally, sort: str, what: object, answer: httpx.Response) -> None:
    """Count an answer of the wire and check its form."""
    tally.count(sort, str(answer.status_code))
    shown = f"{sort} {what!r:.600} -> {answer.status_code} {answer.text!r:.300}"
    if answer.status_code >= 500:
        tally.fail(shown)
    elif answer.status_code >= 400 and answer.status_code != 408:
        with contextlib.suppress(ValueError):
            if isinstance(answer.json()["error"], str):
                return
        tally.fail(f"no error in {shown}")


class User:
    """A client that does what the SDK does, in plain HTTP."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.session_id = ""
        self.model_id = ""
        self.sampler_id = ""
        self.seq_id = 0

    async def begin(self, base_model: str) -> None:
        """Open a session, a model and a sampling session."""
        self.session_id = (await self.call("create_session", sdk_version="0.38.0"))["session_id"]
        await self.begin_model(base_model, 0)
        sampling = await self.call(
            "create_sampling_session",
            session_id=self.session_id,
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        self.sampler_id = sampling["sampling_session_id"]

    async def begin_again(self, base_model: str) -> None:
        """Go on in a new session, so that the runs of the one before are not live any more."""
        ended = self.session_id
        await self.begin(base_model)
        await self.call(f"sessions/{ended}/finish", reason={"type": "success"}, detail=None)

    async def begin_model(self, base_model: str, number: int) -> None:
        """Create a model."""
        created = await self.call(
            "create_model",
            session_id=self.session_id,
            model_seq_id=number,
            base_model=base_model,
            lora_config={"rank": 4, "seed": 1},
        )
        self.model_id = (await self.result(created["request_id"]))["model_id"]
        self.seq_id = 0

    async def keep_alive(self) -> None:
        """Send heartbeats until this is cancelled."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self.call("session_heartbeat", session_id=self.session_id)

    async def call(self, path: str, **body: Any) -> dict[str, Any]:
        """Send JSON and return JSON."""
        answer = await self.http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        content: dict[str, Any] = answer.json()
        return content

    async def result(self, request_id: str) -> dict[str, Any]:
        """Wait for a future; protobuf is told by its size alone."""
        while True:
            answer = await self.http.post(
                "/api/v1/retrieve_future", json={"request_id": request_id}
            )
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, (request_id, answer.status_code, answer.text)
            if answer.headers["content-type"] == "application/x-protobuf":
                return {"content": answer.content}
            content: dict[str, Any] = answer.json()
            return content

    async def train(self, num_steps: int) -> list[bytes]:
        """Train on one sequence; return the results of all batches, to the bit."""
        results = []
        for _ in range(num_steps):
            gradient = await self.submit(batches.valid_batch(self.model_id, self.next_number()))
            update = await self.call(
                "optim_step",
                model_id=self.model_id,
                seq_id=self.next_number(),
                adam_params={"learning_rate": 1e-2},
            )
            batch = await self.result(gradient["request_id"])
            assert "content" in batch, batch
            results.append(batch["content"])
            step = await self.result(update["request_id"])
            assert "metrics" in step, step
        return results

    async def submit(self, request: Any) -> dict[str, Any]:
        """Send a batch."""
        answer = await self.http.post(
            "/api/v1/forward_backward", content=request.SerializeToString(), headers=PROTOBUF
        )
        assert answer.status_code == 200, (answer.status_code, answer.text)
        content: dict[str, Any] = answer.json()
        return content

    def next_number(self) -> int:
        """Return the number of the next call of the model."""
        self.seq_id += 1
        return self.seq_id


@contextlib.asynccontextmanager
async def user(url: str, key: str, base_model: str) -> AsyncIterator[User]:
    """Yield a user with a session, a model and a sampling session."""
    async with httpx.AsyncClient(
        base_url=url,
        headers={"x-api-key": key},
        timeout=120.0,
        limits=httpx.Limits(max_connections=4),
    ) as http:
        made = User(http)
        await made.begin(base_model)
        heart = asyncio.create_task(made.keep_alive())
        try:
            yield made
        finally:
            heart.cancel()


async def attack(
    url: str, key: str, neighbour_key: str, base_model: str, *, count: int, seed: int
) -> Tally:
    """Send hostile requests and return what came of them.

    Args:
        url: Of the gateway.
        key: Whose requests are hostile.
        neighbour_key: Of another project, which trains all the while.
        base_model: Name of a base model.
        count: How many requests.
        seed: Makes them.
    """
    tally = Tally()
    async with user(url, neighbour_key, base_model) as neighbour:
        calm = await neighbour.train(_STEPS)
        shares = [
            count // _NUM_WORKERS + (index < count % _NUM_WORKERS) for index in range(_NUM_WORKERS)
        ]
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(
                    _work(tally, url, key, base_model, share, random.Random(f"{seed}/{index}"))
                )
                for index, share in enumerate(shares)
            ]
            num_rounds = 0
            while num_rounds < 2 or not all(worker.done() for worker in workers):
                await neighbour.begin_again(base_model)
                if await neighbour.train(_STEPS) != calm:
                    tally.fail("the neighbour's training gave other bits beside the attack")
                num_rounds += 1
    return tally


async def _work(
    tally: Tally, url: str, key: str, base_model: str, count: int, chance: random.Random
) -> None:
    async with user(url, key, base_model) as attacker:
        other = User(attacker.http)
        other.session_id = attacker.session_id
        # What damages bytes may damage numbers, so it has a model of its own.
        await other.begin_model(base_model, 7)
        for _ in range(count):
            sort = chance.random()
            if sort < 0.35:
                await _send_meaning(tally, attacker, chance)
            elif sort < 0.55:
                await _send_bytes(tally, other, chance)
            elif sort < 0.9:
                await _send_words(tally, attacker, chance)
            else:
                await _send_head(tally, url, key, chance)
        # It may fail, if a batch before it was refused, and it ends whatever was left behind.
        update = await attacker.call(
            "optim_step", model_id=attacker.model_id, seq_id=attacker.next_number(), adam_params={}
        )
        await attacker.result(update["request_id"])
        try:
            await attacker.train(1)
        except AssertionError as error:
            tally.fail(f"the attacker's own model does not train any more: {error}")


async def _send_meaning(tally: Tally, attacker: User, chance: random.Random) -> None:
    request = batches.damaged_meaning(
        batches.valid_batch(attacker.model_id, attacker.next_number()), chance
    )
    answer = await attacker.http.post(
        "/api/v1/forward_backward", content=request.SerializeToString(), headers=PROTOBUF
    )
    look(tally, "batch", request, answer)
    if answer.status_code != 200:
        tally.fail(f"batch {request!r:.600} -> {answer.status_code}: its number is not used up")
    elif chance.random() < 0.2:
        answer = await attacker.http.post(
            "/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]}
        )
        look(tally, "batch result", request, answer)


async def _send_bytes(tally: Tally, attacker: User, chance: random.Random) -> None:
    request = batches.valid_batch(attacker.model_id, attacker.next_number())
    body = batches.damaged_bytes(request.SerializeToString(), chance)
    headers = dict(PROTOBUF)
    if chance.random() < 0.1:
        headers["content-encoding"] = chance.choice(["zstd", "gzip", "identity", "x"])
    answer = await attacker.http.post("/api/v1/forward_backward", content=body, headers=headers)
    look(tally, "bytes", body, answer)


async def _send_words(tally: Tally, attacker: User, chance: random.Random) -> None:
    method, path, body = _valid_words(attacker, chance)
    text = words.mutate(body, chance)
    content = text.encode("utf-8", "surrogatepass")
    answer = await attacker.http.request(method, f"/api/v1/{path}", content=content, headers=JSON)
    look(tally, f"{method} {path.partition('/')[0]}", text, answer)


async def _send_head(tally: Tally, url: str, key: str, chance: random.Random) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    request = heads.hostile_request(key, chance)
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(request)
            await writer.drain()
            # Half closed: nothing more will come, so nothing is waited for.
            writer.write_eof()
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                received = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    if received[:5] != b"HTTP/":
        tally.statuses["head", _NO_ANSWER[bool(received)]] += 1
        return
    head, _, body = received.partition(b"\r\n\r\n")
    status = head.split(None, 2)[1].decode()
    tally.statuses["head", status] += 1
    shown = f"head {request!r:.600} -> {received!r:.400}"
    if status >= "500":
        tally.fail(shown)
    elif status >= "400" and not request.startswith(b"HEAD") and not _is_error(body):
        tally.fail(f"no error in {shown}")


def _is_error(body: bytes) -> bool:
    try:
        found, _ = json.JSONDecoder().raw_decode(body.decode())
        return isinstance(found["error"], str)
    except (ValueError, KeyError, TypeError):
        return False


def _valid_words(attacker: User, chance: random.Random) -> tuple[str, str, Any]:
    """Return a request of one of the endpoints that take JSON, as it should be."""
    session, model, sampler = attacker.session_id, attacker.model_id, attacker.sampler_id
    number = chance.randrange(100, 10**6)
    path = f"tinker://{model}/weights/x"
    ordered = {"model_id": "unknown:train:0", "seq_id": number}
    metadata = {"a": 1, "b": [None, {"c": "d"}]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    requests: list[tuple[str, str, Any]] = [
        ("POST", "client/config", {"sdk_version": "0.38.0"}),
        ("POST", "telemetry", {"events": [{"a": 1}], "session_id": session}),
        ("POST", "create_session", {"tags": ["a"], "user_metadata": metadata, "display_name": "x"}),
        ("POST", "session_heartbeat", {"session_id": session}),
        ("POST", f"sessions/{session}x/finish", {"reason": {"type": "success"}, "detail": None}),
        ("PUT", f"sessions/{session}/project", {"project_id": "default"}),
        (
            "POST",
            "sessions/search",
            {
                "session_id": session,
                "project_ids": ["default"],
                "user_metadata": {"a": "b"},
                "statuses": [{"type": "active", "reasons": ["success"]}],
                "limit": 5,
                "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "x"},
            },
        ),
        (
            "POST",
            "create_model",
            {
                "session_id": session + "x",
                "model_seq_id": number,
                "base_model": "tiny",
                "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
                "optimizer_config": {"type": "adamw"},
                "user_metadata": metadata,
            },
        ),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "optim_step", {**ordered, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9}}),
        ("POST", "save_weights", {**ordered, "path": "x", "ttl_seconds": 3600, "overwrite": True}),
        ("POST", "save_weights_for_sampler", {**ordered, "path": "x", "kind": "snapshot"}),
        ("POST", "save_weights_for_sampler", {**ordered, "sampling_session_seq_id": 4}),
        (
            "POST",
            "save_weights_external",
            {**ordered, "path": "x", "age_encryption_recipients": ["age1x"]},
        ),
        ("POST", "load_weights", {**ordered, "path": path, "optimizer": True}),
        (
            "POST",
            "load_weights",
            {"session_id": session, "model_seq_id": 3, "path": path, "optimizer": True},
        ),
        (
            "POST",
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"},
        ),
        ("POST", "join_sampling_session", {"sampling_session_id": sampler}),
        (
            "POST",
            "asample",
            {
                "num_samples": 1,
                "prompt": prompt,
                "sampling_params": {"max_tokens": 2, "seed": 1, "stop": [3], "temperature": 1.0},
                "sampling_session_id": sampler,
                "seq_id": number,
                "prompt_logprobs": True,
                "topk_prompt_logprobs": 2,
                "target_prompt_logprobs": {
                    "data": [1, 2, 3, 4],
                    "dtype": "int64",
                    "shape": [2, 2],
                    "sparse_crow_indices": [0, 2, 4],
                    "sparse_col_indices": [0, 1, 0, 1],
                },
                "prompt_alt_tokens_k": 1,
                "prompt_logprobs_last_n": 2,
            },
        ),
        (
            "POST",
            "retrieve_future",
            {"request_id": f"sample.{sampler}.{number}", "allow_metadata_only": True},
        ),
        (
            "POST",
            "retrieve_futures",
            {
                "target": {"type": "sampling_session", "sampling_session_id": sampler},
                "prev_cursor": 0,
                "timeout": 0,
                "retrieved_request_ids": ["x"],
            },
        ),
        ("POST", "cancel_future", {"request_id": f"sample.{sampler}.{number}"}),
        ("POST", "weights_info", {"tinker_path": path}),
        ("POST", "copy_weights", {"source_path": path, "session_id": session, "model_seq_id": 9}),
        ("PUT", f"training_runs/{model}/checkpoints/weights/x/ttl", {"ttl_seconds": 3600}),
    ]
    return chance.choice(requests)
