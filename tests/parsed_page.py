"""A page of the product as tests read it."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Every element opened is closed; collects titles of charts and anything that could load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.charts: list[str] = []
        self.foreign: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "svg":
            self.charts.append(given["aria-label"] or "")
        if tag in ("script", "link", "img", "iframe", "object") or {"src", "href"} & given.keys():
            self.foreign.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
