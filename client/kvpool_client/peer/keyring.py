"""The keys that a node client knows of the Master, and the Master's time: which capabilities hold now.

Rules
  - The key of the epoch that rules is good for everything; the one before, for reading, until the time that the Master
    allows it is over.
  - The Master's time is what it said last, plus what has passed here since. It makes misses, never wrong bytes.
  - An epoch below the one known changes nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvpool_client.clock import Clock
from kvpool_client.peer.copies import Grant
from kvpool_proto.capability import READ, make_mac, same_mac
from kvpool_proto.errors import BadCapability, CapabilityExpired, StaleEpoch


@dataclass(frozen=True, slots=True)
class _Key:
    """offset_ms: of that Master's time against ours. until_ms: by our clock, when the key ends; None: it rules."""

    epoch: int
    key: bytes
    offset_ms: int
    until_ms: int | None = None


class Keyring:
    """Thread safe; empty at first: every capability is of another epoch then."""

    def __init__(self, clock: Clock) -> None:
        self._now_ms = clock.now_ms
        self._lock = threading.Lock()
        self._keys: tuple[_Key, ...] = ()  # the ruling one first; replaced as a whole

    def learn(self, epoch: int, key: bytes, master_ms: int, former_key_ms: int) -> None:
        """The key of an epoch, the Master's time, and how long the key known so far is good for reading from now on."""
        with self._lock:
            now_ms = self._now_ms()
            ruling = self._keys[0] if self._keys else None
            if ruling is not None and epoch < ruling.epoch:
                return
            former = self._keys[1:]
            if ruling is not None and epoch > ruling.epoch:
                former = (_Key(ruling.epoch, ruling.key, ruling.offset_ms, now_ms + former_key_ms),)
            self._keys = (_Key(epoch, key, master_ms - now_ms), *former)

    def tell_time(self, epoch: int, master_ms: int) -> None:
        """What the Master of that epoch calls now."""
        with self._lock:
            if self._keys and self._keys[0].epoch == epoch:
                ruling, *former = self._keys
                self._keys = (_Key(epoch, ruling.key, master_ms - self._now_ms()), *former)

    def check(self, grant: Grant) -> None:
        """Return if the capability is the Master's and holds. Raises BadCapability, or as check_term."""
        key = self._key_of(grant)
        made = make_mac(key.key, grant.op, grant.epoch, grant.valid_until_ms, grant.namespace, grant.part, grant.table)
        if not same_mac(made, grant.mac):
            raise BadCapability("the capability is not the Master's")
        self._check_time(grant, key)

    def check_term(self, grant: Grant) -> None:
        """Return if a capability that was checked before still holds. Raises CapabilityExpired, StaleEpoch."""
        self._check_time(grant, self._key_of(grant))

    def _key_of(self, grant: Grant) -> _Key:
        for key in self._keys:
            former = key.until_ms is not None
            if key.epoch == grant.epoch and not (former and grant.op != READ):
                return key
        raise StaleEpoch(f"a capability of epoch {grant.epoch}")

    def _check_time(self, grant: Grant, key: _Key) -> None:
        now_ms = self._now_ms()
        if key.until_ms is not None and now_ms > key.until_ms:
            raise StaleEpoch(f"capabilities of epoch {grant.epoch} have run out")
        if now_ms + key.offset_ms > grant.valid_until_ms:
            raise CapabilityExpired("the capability has run out")
