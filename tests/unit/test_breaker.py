"""breaker.py: when a peer that did not answer is asked again."""

from __future__ import annotations

from kvpool_client.breaker import BACKOFF_FIRST_MS, BACKOFF_MAX_MS, Backoff, Breaker


def test_it_opens_probes_and_closes() -> None:
    breaker = Breaker()
    assert not breaker.take_probe(0)
    breaker.silent(1_000, 0.5, probe=False)
    assert breaker.open
    assert not breaker.take_probe(1_000 + BACKOFF_FIRST_MS - 1)
    assert breaker.take_probe(1_000 + BACKOFF_FIRST_MS)
    assert not breaker.take_probe(1 << 40)  # one at a time
    breaker.silent(2_000, 0.5, probe=False)  # a call from before: the probe stands
    assert not breaker.take_probe(1 << 40)
    breaker.silent(3_000, 0.5, probe=True)
    assert not breaker.take_probe(3_000 + 2 * BACKOFF_FIRST_MS - 1)
    assert breaker.take_probe(3_000 + 2 * BACKOFF_FIRST_MS)
    assert breaker.opened == 1
    breaker.answered()
    assert not breaker.open
    breaker.silent(4_000, 0.5, probe=False)
    assert (breaker.open, breaker.opened) == (True, 2)


def test_it_backs_off_within_bounds_and_spreads() -> None:
    breaker, now_ms = Breaker(), 0
    for _ in range(20):
        breaker.silent(now_ms, 0.999, probe=True)
        assert not breaker.take_probe(now_ms + BACKOFF_FIRST_MS // 2)
        now_ms += 2 * BACKOFF_MAX_MS
        assert breaker.take_probe(now_ms)
    breaker.answered()
    breaker.silent(now_ms, 0.0, probe=False)
    assert breaker.take_probe(now_ms + BACKOFF_FIRST_MS // 2)


def test_waits_double_up_to_a_bound_and_begin_again() -> None:
    backoff = Backoff(100, 500)
    assert [backoff.next_ms(0.5) for _ in range(5)] == [100, 200, 400, 500, 500]
    assert [backoff.next_ms(0.0), backoff.next_ms(0.998)] == [250, 749]
    backoff.reset()
    assert backoff.next_ms(0.5) == 100
