"""`GET /v1/models` in Anthropic's form, a page at a time; the names are those of OpenAI's list."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.openai.models import ModelList
from tinsmith_runtime.errors import InvalidFieldError

_DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


async def list_models(models: ModelList, call: Call) -> Response:
    """Answer a page of the models.

    Raises:
        InvalidFieldError: If the page is not one.
    """
    listed = [_encode(entry) for entry in await models.entries(call.credential)]
    query = call.request.query_params
    limit = _read_limit(query.get("limit", str(_DEFAULT_LIMIT)))
    names = [str(model["id"]) for model in listed]
    begin, end = 0, len(listed)
    if "after_id" in query:
        begin = _place(names, "after_id", query["after_id"]) + 1
    if "before_id" in query:
        end = _place(names, "before_id", query["before_id"])
        begin = max(begin, end - limit)
    page = listed[begin : min(end, begin + limit)]
    has_more = begin > 0 if "before_id" in query else begin + limit < end
    return JSONResponse(
        {
            "data": page,
            "has_more": has_more,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
        }
    )


async def get_model(models: ModelList, call: Call) -> Response:
    """Answer what a name stands for."""
    return JSONResponse(
        _encode(await models.entry(call.credential, call.request.path_params["id"]))
    )


def _encode(entry: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(entry["created"], datetime.UTC)
    limit = entry.get("max_model_len")
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        # That of a base model is not known: it is the first moment of time, as Anthropic has it.
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }


def _read_limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidFieldError("limit", f"must be 1 to {MAX_LIMIT}")
    return int(text)


def _place(names: list[str], field: str, name: str) -> int:
    if name not in names:
        raise InvalidFieldError(field, "is no model of the list")
    return names.index(name)
