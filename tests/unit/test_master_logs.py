"""One line per event, levels, no flood."""

from __future__ import annotations

import io
import json
import logging

import pytest

from kvpool_master.clock import Clock
from kvpool_master.logs import BURST, WINDOW_MS, LibraryHandler, Log


class Scribe:
    """A log whose time and output are in the test's hand."""

    def __init__(self, level: str = "info", as_json: bool = True) -> None:
        self.now_ms = 0
        self.stream = io.StringIO()
        self.log = Log(level, as_json, Clock(lambda: self.now_ms, lambda: 0.0, lambda: 1_000.5), self.stream)

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_json() -> None:
    scribe = Scribe()
    scribe.log.info("node_up", node="a b", count=3, ok=True, id=b"\x01\xff", text="two\nlines")
    (line,) = scribe.lines()
    assert json.loads(line) == {
        "ts": "1970-01-01T00:16:40.500+00:00",
        "level": "info",
        "event": "node_up",
        "node": "a b",
        "count": 3,
        "ok": True,
        "id": "01ff",
        "text": "two\nlines",
    }


def test_text_stays_one_line_and_is_quoted_where_needed() -> None:
    scribe = Scribe(as_json=False)
    scribe.log.warning("odd", plain="a-b", spaced="a b", lines="x\ny", empty="", equals="a=b", esc="\x1b[0m", n=1)
    (line,) = scribe.lines()
    assert line == (
        '1970-01-01T00:16:40.500+00:00 warning odd plain=a-b spaced="a b" lines="x\\ny" empty=""'
        ' equals="a=b" esc="\\u001b[0m" n=1'
    )


def test_what_is_below_the_level_is_not_written() -> None:
    scribe = Scribe(level="warning")
    scribe.log.debug("a")
    scribe.log.info("b")
    scribe.log.warning("c")
    scribe.log.error("d")
    assert [json.loads(line)["event"] for line in scribe.lines()] == ["c", "d"]


def test_a_flood_of_one_event_is_counted_and_hides_no_other() -> None:
    scribe = Scribe()
    for _ in range(BURST + 7):
        scribe.log.info("flood")
    scribe.log.info("other")
    assert len(scribe.lines()) == BURST + 1
    scribe.now_ms = WINDOW_MS
    scribe.log.info("flood")
    assert json.loads(scribe.lines()[-1])["suppressed"] == 7
    scribe.log.info("flood")
    assert "suppressed" not in json.loads(scribe.lines()[-1])


def test_a_log_that_cannot_be_written_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: str) -> int:
        raise OSError("no space left on device")

    scribe = Scribe()
    with monkeypatch.context() as full:
        full.setattr(scribe.stream, "write", no_room)
        scribe.log.error("lost")
    scribe.log.error("written")
    assert [json.loads(line)["event"] for line in scribe.lines()] == ["written"]
    scribe.stream.close()
    scribe.log.error("nobody_reads_this")


def test_what_libraries_say_becomes_an_event() -> None:
    scribe = Scribe()
    handler = LibraryHandler(scribe.log)
    try:
        raise ValueError("deep")
    except ValueError:
        record = logging.getLogger("some.library").makeRecord("some.library", 40, "f", 1, "it %s", ("broke",), None)
        handler.emit(record)
    event = json.loads(scribe.lines()[0])
    assert (event["event"], event["level"], event["logger"], event["text"]) == (
        "library",
        "error",
        "some.library",
        "it broke",
    )
