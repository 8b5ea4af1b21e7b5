"""Answers of OpenAI's Responses endpoint: a chat's deltas as events, and all of them together as a response."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from pliant.deployments.http.openai_answers import ChatShape, Json, Usage
from pliant.deployments.http.openai_responses import ResponsesRequest, Status
from pliant.deployments.http.openai_stream import INTERNAL, EventStream
from pliant.deployments.http.resumption import Pieces
from pliant.deployments.serving.outcome import RequestError

logger = logging.getLogger("pliant")

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""Of ids, by type of item."""


class Writer:
    """Writes one response: events from what is new of it, and the response itself, as far as it has come."""

    def __init__(self, call: ResponsesRequest, model: str, name: str, prompt_tokens: int) -> None:
        self._name = name
        self.usage = Usage(prompt_tokens)
        self._reasoning_tokens = 0
        self._events = 0
        self._rows: list[Json] = []
        """Log probabilities whose text has not come."""
        self._open: Json | None = None
        """The item that goes on."""
        self.response: Json = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            "parallel_tool_calls": call.parallel_tool_calls is not False,
            "tool_choice": call.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in call.tools or ()],
            "text": {"format": _format(call)},
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "temperature": call.temperature,
            "top_p": call.top_p,
            "metadata": call.metadata or {},
            "store": False,
        }

    def begin(self) -> Iterator[Json]:
        """The first events."""
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def push(self, choice: Json, tokens: int) -> Iterator[Json]:
        """The events of a part of a chat's choice, of so many tokens."""
        delta = choice["delta"]
        calls = delta.get("tool_calls", ())
        self._rows += (choice["logprobs"] or {}).get("content", ())
        if text := delta.get("reasoning_content"):
            self._reasoning_tokens += tokens
            self._rows.clear()
            item = yield from self._item("reasoning")
            item["content"][0]["text"] += text
            yield self._about("response.reasoning_text.delta", delta=text, content_index=0)
        yield from self._call(call for call in calls if "id" not in call)
        if text := delta.get("content"):
            item = yield from self._item("message")
            part, rows, self._rows = item["content"][0], self._rows, []
            part["text"] += text
            part["logprobs"] += rows
            yield self._about("response.output_text.delta", delta=text, content_index=0, logprobs=rows)
        yield from self._call(call for call in calls if "id" in call)

    def _call(self, calls: Iterable[Json]) -> Iterator[Json]:
        """The events of calls, which have ids where they begin."""
        for call in calls:
            if "id" in call:
                yield from self._close("completed")
                yield from self._item("function_call", call_id=call["id"], name=call["function"]["name"])
            if arguments := call["function"]["arguments"]:
                assert self._open
                self._open["arguments"] += arguments
                yield self._about("response.function_call_arguments.delta", delta=arguments)

    def end(self, finish: str | None) -> Iterator[Json]:
        """The last events."""
        cut = finish == "length"
        yield from self._close("incomplete" if cut else "completed")
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self.usage
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.tokens,
        }
        yield self._event(f"response.{self.response['status']}", response=self._snapshot())

    def fail(self, reason: str) -> Json:
        """The last event of a response that was cut off."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": reason}}
        return self._event("response.failed", response=self._snapshot())

    def _item(self, kind: str, **more: str) -> Generator[Json, None, Json]:
        """The item of `kind` that goes on; begins one if there is none."""
        if self._open and self._open["type"] == kind:
            return self._open
        yield from self._close("completed")
        number = len(self.response["output"])
        item: Json = {"id": f"{_PREFIXES[kind]}_{self._name}{number}", "type": kind, "status": "in_progress", **more}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item["arguments"] = ""
        self._open = item
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=number, item=_copy(item))
        if "content" in item:
            item["content"].append(part)
            yield self._about("response.content_part.added", content_index=0, part=_copy(part))
        return item

    def _close(self, status: Status) -> Iterator[Json]:
        """The item that goes on ends."""
        if not (item := self._open):
            return
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._about("response.function_call_arguments.done", **done)
        else:
            [part] = item["content"]
            kind, rows = part["type"], {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._about(f"response.{kind}.done", content_index=0, text=part["text"], **rows)
            yield self._about("response.content_part.done", content_index=0, part=part)
        number = len(self.response["output"]) - 1
        yield self._event("response.output_item.done", output_index=number, item=item)
        self._open = None

    def _about(self, kind: str, **more: Any) -> Json:
        """An event of the item that goes on."""
        assert self._open
        number = len(self.response["output"]) - 1
        return self._event(kind, item_id=self._open["id"], output_index=number, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        event = {"type": kind, "sequence_number": self._events, **more}
        self._events += 1
        return event

    def _snapshot(self) -> Json:
        return {**self.response, "output": list(self.response["output"])}


def _copy(item: Json) -> Json:
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def _format(call: ResponsesRequest) -> Json:
    if call.text and call.text.format:
        return call.text.format.model_dump(by_alias=True, exclude_none=True)
    return {"type": "text"}


def stream(pieces: Pieces, shape: ChatShape, writer: Writer) -> EventStream:
    """The events of a response whose `pieces` come."""

    async def events(pieces: Pieces) -> AsyncGenerator[bytes, None]:
        finish = None
        for event in writer.begin():
            yield _event(event)
        try:
            async for index, piece in pieces:
                finish = piece.finish
                writer.usage.add(index, piece)
                for event in writer.push(shape.part(index, piece), len(piece.tokens)):
                    yield _event(event)
        except RequestError as error:
            yield _event(writer.fail(error.reason))
        except Exception:
            logger.exception("a response was cut off")
            yield _event(writer.fail(INTERNAL.reason))
        else:
            for event in writer.end(finish):
                yield _event(event)

    return EventStream(pieces, events)


async def whole(pieces: Pieces, shape: ChatShape, writer: Writer) -> Json:
    """The response whose `pieces` come."""
    finish = None
    async with aclosing(pieces):
        async for index, piece in pieces:
            finish = piece.finish
            writer.usage.add(index, piece)
            deque(writer.push(shape.part(index, piece), len(piece.tokens)), 0)
    deque(writer.end(finish), 0)
    return writer.response


def _event(event: Json) -> bytes:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
