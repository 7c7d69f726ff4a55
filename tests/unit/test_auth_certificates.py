"""What the Master makes of peers' certificates, call by call."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvpool_master.certificates import CERTIFICATES_MAX, Certificates
from kvpool_master.clock import Clock
from kvpool_proto.security import SecurityError
from kvpool_proto.tls import LOOK_MS, Tls
from unit.tls_world import Pki

DAY_S = 86_400.0


class World:
    """A Master's certificates, and a clock."""

    def __init__(self, folder: Path, **changes: str) -> None:
        self.pki = Pki(folder, days=3)
        self.pki.issue("master")
        self.pki.issue("worker")
        self.now_ms = 0
        self.late_s = 0.0
        clock = Clock(now_ms=lambda: self.now_ms, wall_s=lambda: time.time() + self.late_s)
        tls = Tls(self.pki.security("master", **changes), lambda _: None, clock.now_ms)
        self.certificates = Certificates(tls, clock)

    def judged(self, name: str = "worker") -> str:
        """The reason of a refusal; empty: let in."""
        refusal = self.certificates.refusal((self.pki.folder / f"{name}.pem").read_bytes())
        return "" if refusal is None else refusal.reason

    def later(self) -> None:
        self.now_ms += LOOK_MS


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "pki")


def test_a_good_certificate_may_call(world: World) -> None:
    assert world.judged() == ""
    assert world.judged() == ""


def test_a_certificate_that_runs_out_on_an_open_connection_is_refused(world: World) -> None:
    assert world.judged() == ""
    world.late_s = DAY_S + 60
    assert world.judged() == "certificate_expired"
    world.late_s = -DAY_S
    assert world.judged() == "certificate_expired"


def test_a_certificate_that_is_revoked_later_is_refused(world: World) -> None:
    assert world.judged() == ""
    world.pki.revoke("worker", days=3)
    assert world.judged() == ""  # not looked at yet
    world.later()
    assert world.judged() == "certificate_revoked"
    world.pki.revoke(days=3)
    world.later()
    assert world.judged() == ""


def test_a_list_that_runs_out_lets_nobody_in(world: World) -> None:
    world.pki.issue("worker", days=30)
    world.later()
    assert world.judged() == ""
    world.late_s = 3 * DAY_S + 60
    assert world.judged() == "crl"


def test_a_list_that_cannot_be_read_lets_nobody_in(world: World) -> None:
    (world.pki.folder / "crl.pem").unlink()
    world.later()
    assert world.judged() == "crl"
    world.pki.revoke(days=3)
    world.later()
    assert world.judged() == ""


def test_a_list_that_another_ca_signed_lets_nobody_in(world: World, tmp_path: Path) -> None:
    foreign = Pki(tmp_path / "foreign")  # of the same name
    world.pki.put("crl.pem", (foreign.folder / "crl.pem").read_bytes())
    world.later()
    assert world.judged() == "crl"
    assert world.judged() == "crl"
    with pytest.raises(SecurityError, match="not signed by a CA of tls_ca"):
        Certificates(Tls(world.pki.security("master"), print, lambda: 0), Clock())


def test_without_a_list_only_time_counts(tmp_path: Path) -> None:
    world = World(tmp_path / "pki", crl="")
    world.pki.revoke("worker")
    world.later()
    assert world.judged() == ""
    world.late_s = DAY_S + 60
    assert world.judged() == "certificate_expired"


def test_what_cannot_be_read_is_refused(world: World) -> None:
    refusal = world.certificates.refusal(b"nothing")
    assert refusal is not None
    assert refusal.reason == "certificate"


def test_certificates_are_remembered_within_bounds(world: World) -> None:
    for number in range(CERTIFICATES_MAX + 10):
        world.certificates.refusal(b"%d" % number)
    assert len(world.certificates._known) <= CERTIFICATES_MAX
