"""Headers of HTTP/2 as HAProxy writes them, and those of a gRPC reply.

HAProxy compresses nothing: no Huffman codes, and no table that grows, whose size we set to zero.
So a block of headers means the same whatever came before it, and a block that was seen before need
not be read again. What HAProxy does not send is refused.
"""

from __future__ import annotations

from urllib.parse import quote

MAX_CACHED = 512  # blocks; a caller with one token sends one block for each method

# RFC 7541, appendix A.
STATIC = (
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"),
    (":path", "/index.html"), (":scheme", "http"), (":scheme", "https"), (":status", "200"),
    (":status", "204"), (":status", "206"), (":status", "304"), (":status", "400"),
    (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""),
    ("accept", ""), ("access-control-allow-origin", ""), ("age", ""), ("allow", ""),
    ("authorization", ""), ("cache-control", ""), ("content-disposition", ""),
    ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""),
    ("date", ""), ("etag", ""), ("expect", ""), ("expires", ""), ("from", ""), ("host", ""),
    ("if-match", ""), ("if-modified-since", ""), ("if-none-match", ""), ("if-range", ""),
    ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""), ("location", ""),
    ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""),
    ("vary", ""), ("via", ""), ("www-authenticate", ""),
)  # fmt: skip


class HeaderError(ValueError):
    """A block that HAProxy would not have sent."""


class HeaderReader:
    """Reads blocks of headers, each distinct one once."""

    def __init__(self) -> None:
        self._seen: dict[bytes, dict[str, str]] = {}

    def __call__(self, block: bytes) -> dict[str, str]:
        """Return the headers of a block by name.

        Raises:
            HeaderError: it is broken, or compressed.
        """
        headers = self._seen.get(block)
        if headers is None:
            try:
                headers = dict(_fields(block))
            except IndexError:
                raise HeaderError("a block of headers ends too early") from None
            if len(self._seen) >= MAX_CACHED:
                self._seen.clear()
            self._seen[block] = headers
        return headers


def _fields(block: bytes) -> list[tuple[str, str]]:
    fields = []
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            index, at = _integer(block, at, 7)
            fields.append(_entry(index))
        elif first & 0xE0 == 0x20:  # the size of the table that grows
            size, at = _integer(block, at, 5)
            if size:
                raise HeaderError("a table of headers larger than the settings allow")
        else:
            index, at = _integer(block, at, 6 if first & 0x40 else 4)
            if index:
                name = _entry(index)[0]
            else:
                name, at = _string(block, at)
            value, at = _string(block, at)
            fields.append((name, value))
    return fields


def _entry(index: int) -> tuple[str, str]:
    if not 1 <= index <= len(STATIC):
        raise HeaderError(f"header {index} of a table with {len(STATIC)}")
    return STATIC[index - 1]


def _integer(block: bytes, at: int, num_bits: int) -> tuple[int, int]:
    most = (1 << num_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in (0, 7, 14):
        part = block[at]
        at += 1
        value += (part & 0x7F) << shift
        if not part & 0x80:
            return value, at
    raise HeaderError("a number that is too large")


def _string(block: bytes, at: int) -> tuple[str, int]:
    if block[at] & 0x80:
        raise HeaderError("a Huffman code")
    length, at = _integer(block, at, 7)
    if at + length > len(block):
        raise IndexError
    return block[at : at + length].decode("latin-1"), at + length


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(length: int) -> bytes:
    if length < 127:
        return bytes([length])
    length -= 127
    parts = [127]
    while length >= 128:
        parts.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*parts, length])


REPLY = b"\x88" + _literal(b"content-type", b"application/grpc")
"""The headers of every reply: status 200."""

OK = _literal(b"grpc-status", b"0")
"""The trailers of a reply without a fault."""


def fault(code: int, details: str) -> bytes:
    """Return the trailers that say what is wrong."""
    message = quote(details[:2000], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return _literal(b"grpc-status", b"%d" % code) + _literal(b"grpc-message", message.encode())
