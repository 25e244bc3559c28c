"""Requests that offer another protocol (`Upgrade: h2c`) are answered as if they did not.

That is what RFC 9110, section 7.8, asks of a server that does not know the protocol. Java's HTTP
client and `curl --http2` make this offer by default. httptools takes such a request for complete
after its head. The body would be lost, or worse, be read as the next request.
"""

from __future__ import annotations

from typing import Any

import httptools

# They say how long a body is.
_FRAMING = (b"content-length", b"transfer-encoding")


class UpgradeIgnoringParser:
    """httptools' parser of requests, which stays with HTTP/1.1.

    Where httptools stops after a head, a new parser continues. It first reads a head that has only
    the length of the body, and of that head the protocol learns nothing.

    Args:
        protocol: gets the callbacks of httptools.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._framing: list[bytes] = []
        self._is_repeating = False  # while a new parser reads its first head
        self._parser = self._new_parser()

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn does: otherwise data after "Connection: close" is an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def close(self) -> None:
        """Ends the references between parser and protocol."""
        self._parser = None
        self._protocol = None

    def feed_data(self, data: bytes) -> None:
        """Reads what has come.

        Raises:
            httptools.HttpParserError: it is no HTTP/1.1.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                first_unread: int = stop.args[0]
            data = data[first_unread:]
            self._repeat_head()

    def _repeat_head(self) -> None:
        self._parser = self._new_parser()
        self._is_repeating = True
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(self._framing))
        finally:
            self._is_repeating = False

    # --- what uvicorn asks for

    def get_http_version(self) -> str:
        """Such as "1.1"."""
        version: str = self._parser.get_http_version()
        return version

    def get_method(self) -> bytes:
        """Such as b"POST"."""
        method: bytes = self._parser.get_method()
        return method

    def should_keep_alive(self) -> bool:
        """Whether the client may send another request."""
        should_keep: bool = self._parser.should_keep_alive()
        return should_keep

    def should_upgrade(self) -> bool:
        """Never: the offer is ignored."""
        return False

    # --- what httptools calls

    def on_message_begin(self) -> None:
        """Begins a request."""
        if not self._is_repeating:
            self._framing = []
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Passes a part of the path on."""
        if not self._is_repeating:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Passes a header on, and keeps it if it says how long the body is."""
        if self._is_repeating:
            return
        if name.lower() in _FRAMING:
            self._framing.append(b"%b: %b\r\n" % (name, value))
        self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Passes the end of a head on."""
        if not self._is_repeating:
            self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Passes a part of a body on."""
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        """Passes the end of a request on, unless its body is still to come."""
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()
