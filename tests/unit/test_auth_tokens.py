"""The tokens file: what is taken, what is refused, and when it is read again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvpool_master.clock import Clock
from kvpool_master.tokens import LOOK_MS, Token, Tokens
from kvpool_proto.security import SecurityError


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def table(token: str, name: str = "t", more: str = 'role = "admin"') -> str:
    return f'[[token]]\nname = "{name}"\nsha256 = "{digest(token)}"\n{more}\n'


class World:
    """A tokens file, a clock, and what was warned of."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.toml"
        self.now_ms = 0
        self.warnings: list[str] = []
        self.put("")

    def put(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.chmod(0o600)
        fresh.replace(self.path)

    def read(self, text: str | None = None) -> Tokens:
        if text is not None:
            self.put(text)
        return Tokens(str(self.path), Clock(now_ms=lambda: self.now_ms), self.warnings.append)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_tokens_are_found_by_what_is_presented(world: World) -> None:
    tokens = world.read(
        table("one", "w", 'role = "worker"\ntenants = ["a", "b"]\nexpires = 1970-01-01T00:01:40Z')
        + table("two", "n", 'role = "node"').replace(digest("two"), digest("two").upper())
    )
    assert tokens.find("one") == Token("w", "worker", frozenset({"a", "b"}), 100.0)
    assert tokens.find("two") == Token("n", "node", frozenset(), None)
    assert tokens.find("three") is None
    assert tokens.find(digest("one")) is None


def test_an_empty_file_knows_nobody(world: World) -> None:
    assert world.read("").find("one") is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[token", "tokens.toml: "),
        ("[tokens]\n", r"only tables \[\[token\]\] are known"),
        ("token = 3\n", r"only tables \[\[token\]\] are known"),
        ("token = [3]\n", r"token 1: only tables"),
        (table("x").replace('name = "t"', 'name = ""'), "token 1: name = ''"),
        (table("x").replace(digest("x"), "abc"), "token 1: sha256 = 'abc': 64 hexadecimal digits"),
        (table("x").replace(digest("x"), "g" * 64), "64 hexadecimal digits"),
        (table("x", more='role = "root"'), "role = 'root': one of worker, node, admin"),
        (table("x", more=""), "role = None"),
        (table("x", more='role = "admin"\nsince = 3'), "unknown key 'since'"),
        (table("x", more='role = "worker"'), "tenants: workers have some"),
        (table("x", more='role = "node"\ntenants = ["a"]'), "others have none"),
        (table("x", more='role = "worker"\ntenants = [3]'), "tenants: a list of texts"),
        (table("x", more='role = "worker"\ntenants = "a"'), "tenants: a list of texts"),
        (table("x", more='role = "node"\nexpires = 2027-01-01T00:00:00'), "expires = .*: date, time and zone"),
        (table("x", more='role = "node"\nexpires = 3'), "date, time and zone"),
        (table("x") + table("y"), "token 2: its name or sha256 stands there twice"),
        (table("x") + table("x", "u"), "token 2: its name or sha256 stands there twice"),
    ],
)
def test_what_is_wrong_is_named(world: World, text: str, word: str) -> None:
    with pytest.raises(SecurityError, match=word) as caught:
        world.read(text)
    assert "\n" not in str(caught.value)


def test_a_file_that_others_can_write_is_refused(world: World) -> None:
    world.path.chmod(0o622)
    with pytest.raises(SecurityError, match=r"tokens_file = .*chmod 600 it"):
        world.read()


def test_a_replaced_file_is_read_again(world: World) -> None:
    tokens = world.read(table("one"))
    world.put(table("two"))
    assert tokens.find("one") is not None  # not looked at yet
    world.now_ms += LOOK_MS
    assert tokens.find("one") is None
    assert tokens.find("two") is not None
    assert world.warnings == []


def test_a_broken_new_file_leaves_the_former_and_is_told_once(world: World) -> None:
    tokens = world.read(table("one"))
    world.put("[[token")
    for _ in range(3):
        world.now_ms += LOOK_MS
        assert tokens.find("one") is not None
    world.path.unlink()
    world.now_ms += LOOK_MS
    assert tokens.find("one") is not None
    assert len(world.warnings) == 2
    assert all("the former tokens still hold" in warning for warning in world.warnings)
    world.put(table("two"))
    world.now_ms += LOOK_MS
    assert tokens.find("one") is None
