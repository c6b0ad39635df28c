"""The gRPC server answers HAProxy's kind of HTTP/2, and survives everything else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloudsched.serving.backend import Backend, ServingSettings
from cloudsched.serving.grpc_server import HEALTH, REFLECTION, GrpcServer
from cloudsched.serving.hpack import STATIC, HeaderError, HeaderReader, _literal, fault
from cloudsched.serving.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    _frame,
    _setting,
    _word,
)
from cloudsched.serving.limits import Gate, LimitSettings
from cloudsched.serving.proto import cloudsched_pb2
from cloudsched.serving.rpc import Calls
from cloudsched.serving.rpc_client import decision_message_of
from cloudsched.serving.store import LocalStore

TOKEN = "secret"
DECIDE, BATCH = "/cloudsched.v1.Scheduler/Decide", "/cloudsched.v1.Scheduler/DecideBatch"
messages: Any = cloudsched_pb2
REQUEST = decision_message_of({"queue": [{"id": "a", "demand": [0.1, 0.1], "duration": 3}]})


def headers_of(path: str, token: str = TOKEN) -> bytes:
    """Return a block as HAProxy writes it."""
    fields = ((b":path", path.encode()), (b"authorization", b"Bearer " + token.encode()))
    return b"\x83\x86" + b"".join(_literal(name, value) for name, value in fields)


def framed(message: bytes) -> bytes:
    return b"\0" + _word.pack(len(message)) + message


class Caller:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._read_headers = HeaderReader()

    def send(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))

    def call(self, number: int, path: str, message: bytes, token: str = TOKEN) -> None:
        self.send(
            _frame(HEADERS, END_HEADERS, number, headers_of(path, token)),
            _frame(DATA, END_STREAM, number, framed(message)),
        )

    async def frame(self) -> tuple[int, int, int, bytes]:
        head = await asyncio.wait_for(self._reader.readexactly(9), 10)
        payload = await asyncio.wait_for(self._reader.readexactly(int.from_bytes(head[:3])), 10)
        return head[3], head[4], int.from_bytes(head[5:]), payload

    async def reply(self, number: int) -> tuple[dict[str, str], bytes]:
        """Return the trailers and the message of a stream."""
        body = b""
        while True:
            kind, flags, stream, payload = await self.frame()
            if stream != number:
                continue
            if kind == DATA:
                body += payload
            elif kind == HEADERS and flags & END_STREAM:
                return self._read_headers(payload), body[5:]
            assert kind in (DATA, HEADERS, WINDOW)

    async def frame_of(self, kind: int) -> bytes:
        while True:
            frame = await self.frame()
            if frame[0] == kind:
                return frame[3]

    def close(self) -> None:
        self._writer.close()

    async def is_closed(self) -> bool:
        await asyncio.wait_for(self._reader.read(), 10)
        return self._reader.at_eof()


def with_server(
    folder: Path, test: Callable[[Callable[..., Any], GrpcServer], Coroutine[Any, Any, None]]
) -> None:
    """Run a test against a server; it gets a function that connects."""

    async def run() -> None:
        settings = ServingSettings(token=TOKEN, state_dir=str(folder), policy="best_fit+sleep")
        calls = Calls()
        calls.gate = Gate(TOKEN, LimitSettings(max_body_bytes=100_000))
        calls.backend = Backend(settings, LocalStore(folder / "clusters.sqlite"), "test")
        num_ongoing = 0

        def count(change: int) -> None:
            nonlocal num_ongoing
            num_ongoing += change

        async def health(_: Any, context: Any) -> bytes:
            return b"healthy"

        server = GrpcServer(calls, health, count)
        port = await server.start("127.0.0.1", 0)

        callers: list[Caller] = []

        async def connect(*first: bytes) -> Caller:
            caller = Caller(*await asyncio.open_connection("127.0.0.1", port))
            callers.append(caller)
            caller.send(*(first or (PREFACE, _frame(SETTINGS, 0, 0, b""))))
            return caller

        try:
            await test(connect, server)
            assert num_ongoing == 0
        finally:
            for caller in callers:
                caller.close()
            await server.stop(0.0)

    asyncio.run(run())


def test_calls_are_answered_side_by_side(tmp_path: Path) -> None:
    async def test(connect: Any, server: GrpcServer) -> None:
        caller = await connect()
        for number in (1, 3, 5):
            caller.call(number, DECIDE, REQUEST.SerializeToString())
        for number in (1, 3, 5):
            trailers, message = await caller.reply(number)
            assert trailers == {"grpc-status": "0"}
            reply = messages.DecisionReply.FromString(message)
            assert [d.job for d in reply.decisions if d.kind == "place"] == ["a"]
        caller.call(7, HEALTH, b"")
        assert await caller.reply(7) == ({"grpc-status": "0"}, b"healthy")

    with_server(tmp_path, test)


def test_faults_have_their_status(tmp_path: Path) -> None:
    async def test(connect: Any, server: GrpcServer) -> None:
        caller = await connect()
        cases = [
            (DECIDE, b"", "wrong", "16"),
            (DECIDE, b"\xff\xff", TOKEN, "3"),
            ("/cloudsched.v1.Scheduler/NoSuch", b"", TOKEN, "12"),
            (BATCH, b"", TOKEN, "3"),
        ]
        for number, (path, message, token, status) in enumerate(cases):
            caller.call(2 * number + 1, path, message, token)
            trailers, _ = await caller.reply(2 * number + 1)
            assert trailers["grpc-status"] == status
        for number, body, status in ((21, b"\1\0\0\0\0", "12"), (23, b"\0\0\0\0\5ab", "13")):
            caller.send(
                _frame(HEADERS, END_HEADERS, number, headers_of(DECIDE)),
                _frame(DATA, END_STREAM, number, body),
            )
            assert (await caller.reply(number))[0]["grpc-status"] == status
        caller.send(_frame(HEADERS, END_HEADERS, 25, headers_of(DECIDE)))
        for _ in range(8):
            caller.send(_frame(DATA, 0, 25, bytes(16_000)))
        assert (await caller.reply(25))[0]["grpc-status"] == "8"  # too large
        caller.call(27, DECIDE, REQUEST.SerializeToString())
        assert (await caller.reply(27))[0]["grpc-status"] == "0"

    with_server(tmp_path, test)


def test_a_large_reply_waits_for_room(tmp_path: Path) -> None:
    async def test(connect: Any, server: GrpcServer) -> None:
        small = _frame(SETTINGS, 0, 0, _setting.pack(INITIAL_WINDOW, 100))
        caller = await connect(PREFACE, small)
        batch = messages.BatchRequest(requests=[REQUEST] * 200)
        whole = framed(batch.SerializeToString())
        block = headers_of(BATCH)
        # Headers in two parts, with padding and a priority; a body in small pieces.
        caller.send(
            _frame(HEADERS, PADDED | 0x20, 1, b"\3" + bytes(5) + block[:9] + bytes(3)),
            _frame(CONTINUATION, END_HEADERS, 1, block[9:]),
            *(_frame(DATA, 0, 1, whole[i : i + 1000]) for i in range(0, len(whole), 1000)),
            _frame(DATA, END_STREAM, 1, b""),
        )
        body = b""
        while True:
            kind, flags, stream, payload = await caller.frame()
            if stream == 1 and kind == DATA:
                assert len(payload) <= 100
                body += payload
                more = _word.pack(len(payload))
                caller.send(_frame(WINDOW, 0, 1, more), _frame(WINDOW, 0, 0, more))
            elif kind == HEADERS and flags & END_STREAM:
                break
        assert len(messages.BatchReply.FromString(body[5:]).replies) == 200

    with_server(tmp_path, test)


def test_reflection_answers_every_message_of_a_stream(tmp_path: Path) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    async def test(connect: Any, server: GrpcServer) -> None:
        caller = await connect()
        question = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
        caller.send(_frame(HEADERS, END_HEADERS, 1, headers_of(REFLECTION)))
        for _ in range(2):
            caller.send(_frame(DATA, 0, 1, framed(question)))
            answer = reflection_pb2.ServerReflectionResponse.FromString(
                (await caller.frame_of(DATA))[5:]
            )
            names = [service.name for service in answer.list_services_response.service]
            assert "cloudsched.v1.Scheduler" in names
        caller.send(_frame(DATA, END_STREAM, 1, b""))
        assert (await caller.reply(1))[0] == {"grpc-status": "0"}

    with_server(tmp_path, test)


def test_a_server_that_stops_answers_what_it_has_in_hand(tmp_path: Path) -> None:
    async def test(connect: Any, server: GrpcServer) -> None:
        caller = await connect()
        caller.send(_frame(HEADERS, END_HEADERS, 1, headers_of(DECIDE)))
        caller.send(_frame(PING, 0, 0, b"12345678"))
        assert await caller.frame_of(SETTINGS) is not None
        assert await caller.frame_of(PING) == b"12345678"
        stopping = asyncio.create_task(server.stop(10.0))
        await caller.frame_of(GOAWAY)
        caller.send(
            _frame(HEADERS, END_HEADERS | END_STREAM, 3, headers_of(DECIDE)),
            _frame(DATA, END_STREAM, 1, framed(REQUEST.SerializeToString())),
        )
        assert await caller.frame_of(RST_STREAM) == _word.pack(7)  # refused: safe to repeat
        assert (await caller.reply(1))[0] == {"grpc-status": "0"}
        assert await caller.is_closed()
        await stopping

    with_server(tmp_path, test)


def test_a_caller_that_breaks_the_protocol_is_cut_off_and_hurts_nobody(tmp_path: Path) -> None:
    async def test(connect: Any, server: GrpcServer) -> None:
        start = PREFACE + _frame(SETTINGS, 0, 0, b"")
        for broken in (
            b"GET / HTTP/1.1\r\n\r\n" + bytes(20),
            start + b"\xff\xff\xff" + bytes(6),  # a frame of 16 MiB
            start + _frame(HEADERS, END_HEADERS, 2, headers_of(DECIDE)),  # not a client's number
            start + _frame(CONTINUATION, END_HEADERS, 1, b""),
            start + _frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
            start + _frame(HEADERS, 0, 1, b"") + _frame(PING, 0, 0, bytes(8)),
            start + _frame(WINDOW, 0, 0, b"1"),
            start + _frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09abc"),
        ):
            assert await (await connect(broken)).is_closed()
        # A caller that goes away in the middle of its call, and one that gives it up.
        gone = await connect()
        gone.call(1, DECIDE, REQUEST.SerializeToString())
        gone.close()
        caller = await connect()
        caller.call(1, DECIDE, REQUEST.SerializeToString())
        caller.send(_frame(RST_STREAM, 0, 1, _word.pack(8)), _frame(PRIORITY, 0, 1, bytes(5)))
        generator = random.Random(0)
        kinds = (DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW, CONTINUATION, GOAWAY, 99)
        for _ in range(300):
            frames = [
                _frame(
                    generator.choice(kinds),
                    generator.randrange(256),
                    generator.randrange(6),
                    generator.choice(
                        [generator.randbytes(generator.randrange(60)), headers_of(DECIDE)]
                    ),
                )
                for _ in range(generator.randrange(1, 9))
            ]
            noisy = await connect(start, *frames)
            noisy.close()
        caller.call(3, DECIDE, REQUEST.SerializeToString())
        assert (await caller.reply(3))[0] == {"grpc-status": "0"}

    with_server(tmp_path, test)


def test_headers_are_read_as_the_standard_has_them() -> None:
    assert len(STATIC) == 61
    read = HeaderReader()
    # RFC 7541, C.2.1, C.2.2 and C.2.4.
    assert read(bytes.fromhex("400a637573746f6d2d6b65790d637573746f6d2d686561646572")) == {
        "custom-key": "custom-header"
    }
    assert read(bytes.fromhex("040c2f73616d706c652f70617468")) == {":path": "/sample/path"}
    assert read(b"\x82") == {":method": "GET"}
    long = "x" * 5000
    assert read(_literal(b"name", long.encode())) == {"name": long}
    assert read(fault(3, "ä%\n"))["grpc-message"] == "%C3%A4%25%0A"
    for broken in (b"\x00\x85abc", b"\xc0", b"\x00\x05ab", b"\x3f\xe1\x1f", b"\x80"):
        with pytest.raises(HeaderError):
            read(broken)
    assert ACK == END_STREAM
