"""gRPC over HTTP/2 behind HAProxy, as a protocol of asyncio.

The server of grpcio passes each call through a thread, a queue and a dozen callbacks; that costs
more than the decision. Here a call is answered as soon as it has arrived, is a task only when it
has to wait, and all replies to what was read at once are one write. It speaks to HAProxy, which
speaks to everyone else.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from struct import Struct
from typing import Any, NamedTuple

from cloudsched.serving.hpack import OK, REPLY, HeaderError, HeaderReader, fault

logger = logging.getLogger("ray.serve")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW, CONTINUATION = (
    range(10)
)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 3, 4, 5
PROTOCOL_ERROR, FLOW_ERROR, SIZE_ERROR, REFUSED, COMPRESSION_ERROR = 0x1, 0x3, 0x6, 0x7, 0x9
UNIMPLEMENTED, INTERNAL, EXHAUSTED = 12, 13, 8

FRAME_SIZE = 16_384  # of a frame that we take
ROOM = 2**24  # bytes that a caller may send before we say so, on a stream and on a connection
NUM_STREAMS = 1_024
MAX_HEADERS = 65_536

_word, _setting = Struct(">I"), Struct(">HI")


class Status(Exception):
    """Why a call failed, as gRPC says it."""

    def __init__(self, code: int, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class Method(NamedTuple):
    """What answers a path: one of the two."""

    call: Callable[[bytes, Mapping[str, str], str], Awaitable[bytes]] | None = None
    """Answers the one message of a call, given its headers and the caller's address."""
    each: Callable[[bytes], bytes] | None = None
    """Answers every message of a stream, at once."""


class Stream:
    """One call that is not answered in full."""

    __slots__ = ("body", "has_begun", "headers", "method", "pending", "task", "window")

    def __init__(self, headers: Mapping[str, str], method: Method | None, window: int) -> None:
        self.headers = headers
        self.method = method
        self.body = bytearray()
        self.window = window  # bytes that we may send
        self.pending = b""  # bytes that must wait for it, before the trailers
        self.has_begun = False
        self.task: asyncio.Task[None] | None = None


class Http2Connection(asyncio.Protocol):
    """One connection.

    Args:
        methods: by path.
        max_message: bytes of the largest message that is taken.
        connections: where open connections are listed.
    """

    def __init__(
        self, methods: Mapping[str, Method], max_message: int, connections: set[Http2Connection]
    ) -> None:
        self._methods = methods
        self._max_message = max_message
        self._connections = connections
        self._read_headers = HeaderReader()
        self._buffer = bytearray()
        self._has_preface = False
        self._streams: dict[int, Stream] = {}
        self._trailers: dict[int, bytes] = {}  # of streams that wait for room
        self._block: tuple[int, int, bytearray] | None = None  # headers that go on
        self._window = 65_535
        self._initial_window = 65_535
        self._max_frame = FRAME_SIZE
        self._received = 0
        self._last_stream = 0
        self._out: list[bytes] = []
        self._is_reading = False
        self._is_closing = False
        self._is_broken = False

    def connection_made(self, transport: Any) -> None:
        """Say what we take."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._connections.add(self)
        peer = transport.get_extra_info("peername") or ("unknown",)
        self._peer = str(peer[0])
        pairs = ((HEADER_TABLE_SIZE, 0), (MAX_STREAMS, NUM_STREAMS), (INITIAL_WINDOW, ROOM))
        settings = b"".join(_setting.pack(name, value) for name, value in pairs)
        self._send(_frame(SETTINGS, 0, 0, settings) + _frame(WINDOW, 0, 0, _word.pack(ROOM)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the calls: nobody waits for them."""
        self._connections.discard(self)
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()
        self._streams.clear()

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        buffer = self._buffer
        buffer += data
        if not self._has_preface:
            if len(buffer) < len(PREFACE):
                if not PREFACE.startswith(buffer):
                    self._transport.close()
                return
            if not buffer.startswith(PREFACE):
                self._transport.close()
                return
            del buffer[: len(PREFACE)]
            self._has_preface = True
        at = 0
        self._is_reading = True
        try:
            while len(buffer) - at >= 9 and not self._is_broken:
                length = int.from_bytes(buffer[at : at + 3], "big")
                if length > FRAME_SIZE:
                    raise _Fault(SIZE_ERROR)
                end = at + 9 + length
                if end > len(buffer):
                    break
                kind, flags = buffer[at + 3], buffer[at + 4]
                number = int.from_bytes(buffer[at + 5 : at + 9], "big") & 0x7FFFFFFF
                self._take(kind, flags, number, bytes(buffer[at + 9 : end]))
                at = end
        except _Fault as error:
            self._give_up(error.code)
        except HeaderError:
            self._give_up(COMPRESSION_ERROR)
        finally:
            self._is_reading = False
        del buffer[:at]
        self._flush()

    def finish(self) -> None:
        """Take no new calls; close when those in hand are answered."""
        if not self._is_closing:
            self._send(_frame(GOAWAY, 0, 0, _word.pack(self._last_stream) + bytes(4)))
        self._is_closing = True
        self._close_if_done()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise _Fault(PROTOCOL_ERROR)
        if kind == DATA:
            self._take_data(flags, number, payload)
        elif kind == HEADERS:
            block = _unpadded(flags, payload)
            self._collect(flags, number, flags, block[5:] if flags & WITH_PRIORITY else block)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != number:
                raise _Fault(PROTOCOL_ERROR)
            self._collect(flags, number, self._block[1], payload)
        elif kind == SETTINGS:
            if not flags & ACK:
                self._take_settings(payload)
        elif kind == WINDOW:
            self._take_window(number, payload)
        elif kind == PING:
            if not flags & ACK:
                self._send(_frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM:
            self._drop(number)
        elif kind == PUSH_PROMISE:
            raise _Fault(PROTOCOL_ERROR)

    def _collect(self, flags: int, number: int, first_flags: int, part: bytes) -> None:
        """Put a block of headers together; begin its call when it is whole."""
        block = bytearray() if self._block is None else self._block[2]
        block += part
        if len(block) > MAX_HEADERS:
            raise _Fault(SIZE_ERROR)
        if not flags & END_HEADERS:
            self._block = (number, first_flags, block)
            return
        self._block = None
        headers = self._read_headers(bytes(block))
        stream = self._streams.get(number)
        if stream is None:
            if number % 2 == 0 or number <= self._last_stream:
                raise _Fault(PROTOCOL_ERROR)
            if self._is_closing or len(self._streams) >= NUM_STREAMS:
                self._send(_frame(RST_STREAM, 0, number, _word.pack(REFUSED)))
                return
            self._last_stream = number
            method = self._methods.get(headers.get(":path", ""))
            stream = self._streams[number] = Stream(headers, method, self._initial_window)
        if first_flags & END_STREAM:
            self._end(number, stream)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received > ROOM // 2:
            self._send(_frame(WINDOW, 0, 0, _word.pack(self._received)))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None or stream.task is not None:
            return  # answered already, such as a call that was too large
        stream.body += _unpadded(flags, payload)
        if len(stream.body) > self._max_message + 5:
            details = f"The message has more than {self._max_message} bytes. Send smaller batches."
            self._answer(number, b"", fault(EXHAUSTED, details))
            return
        if not flags & END_STREAM and len(payload):
            self._send(_frame(WINDOW, 0, number, _word.pack(len(payload))))
        if stream.method is not None and stream.method.each is not None:
            self._answer_each(number, stream, stream.method.each)
        if flags & END_STREAM:
            self._end(number, stream)

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            name, value = _setting.unpack_from(payload, at)
            if name == INITIAL_WINDOW:
                if value > 0x7FFFFFFF:
                    raise _Fault(FLOW_ERROR)
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
            elif name == MAX_FRAME:
                self._max_frame = max(FRAME_SIZE, min(value, 2**24 - 1))
        self._send(_frame(SETTINGS, ACK, 0, b""))

    def _take_window(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _Fault(SIZE_ERROR)
        more = _word.unpack(payload)[0] & 0x7FFFFFFF
        if number == 0:
            self._window += more
            for waiting in [n for n, stream in self._streams.items() if stream.pending]:
                self._go_on(waiting)
        elif number in self._streams:
            self._streams[number].window += more
            self._go_on(number)

    def _answer_each(self, number: int, stream: Stream, each: Callable[[bytes], bytes]) -> None:
        """Answer the messages of a stream that are whole."""
        while len(stream.body) >= 5:
            end = 5 + int.from_bytes(stream.body[1:5], "big")
            if len(stream.body) < end:
                return
            reply = each(bytes(stream.body[5:end]))
            del stream.body[:end]
            if not stream.has_begun:
                self._send(_frame(HEADERS, END_HEADERS, number, REPLY))
                stream.has_begun = True
            stream.pending += b"\0" + _word.pack(len(reply)) + reply
            self._go_on(number)

    def _end(self, number: int, stream: Stream) -> None:
        """The caller has said everything: answer."""
        method = stream.method
        if method is None:
            path = stream.headers.get(":path", "")
            self._answer(number, b"", fault(UNIMPLEMENTED, f"No method {path!r}."))
        elif method.call is None:
            self._answer(number, b"", OK)
        else:
            call = self._call(number, stream, method.call)
            try:
                waits_for = call.send(None)
            except StopIteration:
                return  # most calls: they have been answered
            stream.task = self._loop.create_task(_rest(call, waits_for))

    async def _call(self, number: int, stream: Stream, call: Any) -> None:
        body = stream.body
        try:
            if len(body) < 5 or int.from_bytes(body[1:5], "big") != len(body) - 5:
                raise Status(INTERNAL, "Expected one whole message.")
            if body[0]:
                raise Status(UNIMPLEMENTED, "Compressed messages are not taken.")
            reply = await call(bytes(body[5:]), stream.headers, self._peer)
        except Status as error:
            self._answer(number, b"", fault(error.code, error.details))
        except Exception:
            logger.exception("A call failed.")
            self._answer(number, b"", fault(INTERNAL, "The service failed; its log says why."))
        else:
            self._answer(number, b"\0" + _word.pack(len(reply)) + reply, OK)

    def _answer(self, number: int, message: bytes, trailers: bytes) -> None:
        """Send a reply, as far as there is room, and end its stream."""
        stream = self._streams.get(number)
        if stream is None:
            return  # the caller has gone
        size = len(message)
        if not stream.has_begun and not stream.pending:
            if not size:
                block = REPLY + trailers
                self._send(_frame(HEADERS, END_HEADERS | END_STREAM, number, block))
                self._forget(number)
                return
            if size <= min(self._window, stream.window, self._max_frame):
                self._window -= size
                self._send(
                    _frame(HEADERS, END_HEADERS, number, REPLY)
                    + _frame(DATA, 0, number, message)
                    + _frame(HEADERS, END_HEADERS | END_STREAM, number, trailers)
                )
                self._forget(number)
                return
        if not stream.has_begun:
            self._send(_frame(HEADERS, END_HEADERS, number, REPLY))
            stream.has_begun = True
        stream.pending += message
        self._trailers[number] = trailers
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Send what there is room for by now."""
        stream = self._streams[number]
        while stream.pending:
            size = min(len(stream.pending), self._window, stream.window, self._max_frame)
            if size <= 0:
                return
            self._send(_frame(DATA, 0, number, stream.pending[:size]))
            stream.pending = stream.pending[size:]
            stream.window -= size
            self._window -= size
        trailers = self._trailers.get(number)
        if trailers is not None:
            self._send(_frame(HEADERS, END_HEADERS | END_STREAM, number, trailers))
            self._forget(number)

    def _drop(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            if stream.task is not None:
                stream.task.cancel()
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)
        self._trailers.pop(number, None)
        self._close_if_done()

    def _give_up(self, code: int) -> None:
        """Close a connection whose other end breaks the protocol."""
        self._is_closing = self._is_broken = True
        self._send(_frame(GOAWAY, 0, 0, _word.pack(self._last_stream) + _word.pack(code)))
        self._flush()
        self._transport.close()

    def _close_if_done(self) -> None:
        if self._is_closing and not self._streams:
            self._flush()
            self._transport.close()

    def _send(self, frames: bytes) -> None:
        """Send when everything is read, or else at the end of this turn of the loop."""
        if not self._out and not self._is_reading:
            self._loop.call_soon(self._flush)
        self._out.append(frames)

    def _flush(self) -> None:
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()


class _Fault(Exception):
    """The other end breaks the protocol."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


async def _rest(call: Coroutine[Any, Any, None], waits_for: Any) -> None:
    """Go on with a call that has begun."""
    await _steps(call, waits_for)


@types.coroutine
def _steps(call: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            given = yield waits_for
        except BaseException as error:  # such as the end of the task
            step: Any = call.throw
            given = error
        else:
            step = call.send
        try:
            waits_for = step(given)
        except StopIteration:
            return


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return b"%b%c%c%b%b" % (
        len(payload).to_bytes(3, "big"), kind, flags, _word.pack(number), payload,
    )  # fmt: skip


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _Fault(PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]
