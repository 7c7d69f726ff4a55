"""The choice between TLS and plain text, and what is demanded of files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool_proto.security import (
    FILE_BYTES_MAX,
    PLAINTEXT,
    Security,
    SecurityError,
    read_public,
    read_secret,
    read_word,
)

WHOLE = Security(ca="ca.pem", cert="cert.pem", key="cert.key")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"word\n")
    path.chmod(0o600)
    return path


def test_plain_text_and_tls_are_both_a_choice() -> None:
    PLAINTEXT.check()
    WHOLE.check()
    replace(WHOLE, crl="crl.pem", key_password_file="password", token_file="token", data_plaintext=True).check()


def test_no_choice_says_what_to_do() -> None:
    with pytest.raises(SecurityError, match=r"make certs.*--plaintext") as caught:
        Security().check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("security", "text"),
    [
        (replace(WHOLE, key=""), "tls_ca without tls_key"),
        (Security(crl="crl.pem"), "tls_crl without tls_ca, tls_cert, tls_key"),
        (Security(token_file="token"), "token_file without tls_ca"),
        (replace(WHOLE, plaintext=True), "plaintext together with tls_ca"),
        (Security(plaintext=True, token_file="token"), "plaintext together with token_file"),
    ],
)
def test_half_a_choice_is_refused(security: Security, text: str) -> None:
    with pytest.raises(SecurityError, match=text):
        security.check()


def test_a_worker_is_told_by_its_environment() -> None:
    assert Security.from_environment({"KVPOOL_PLAINTEXT": "1"}) == PLAINTEXT
    told = {"KVPOOL_TLS_CA": "ca.pem", "KVPOOL_TLS_CERT": "cert.pem", "KVPOOL_TLS_KEY": "cert.key"}
    assert Security.from_environment(told | {"KVPOOL_PLAINTEXT": "false"}) == WHOLE
    assert Security.from_environment(told | {"KVPOOL_DATA_PLAINTEXT": "on"}).data_plaintext
    with pytest.raises(SecurityError, match="KVPOOL_PLAINTEXT = 'perhaps': true or false"):
        Security.from_environment({"KVPOOL_PLAINTEXT": "perhaps"})
    with pytest.raises(SecurityError, match="neither TLS nor plain text"):
        Security.from_environment({})


def test_a_file_of_our_own_is_read(file: Path) -> None:
    assert read_secret("tls_key", str(file)) == b"word\n"
    assert read_word("token_file", str(file)) == "word"
    file.chmod(0o644)
    assert read_public("tls_ca", str(file)) == b"word\n"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_secret_that_others_may_touch_is_refused(file: Path, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(file, 0, 4_242)  # a group that is not ours
    file.chmod(mode)
    with pytest.raises(SecurityError, match=r"tls_key = .*file: may be read by others \(mode 0\d+\); chmod 600 it"):
        read_secret("tls_key", str(file))


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_certificate_that_others_may_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(SecurityError, match=r"may be written by others .*; chmod go-w it"):
        read_public("tls_ca", str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_roots_secrets_may_be_our_groups_to_read(file: Path) -> None:
    os.chown(file, 0, os.getegid())
    file.chmod(0o640)
    assert read_secret("tls_key", str(file)) == b"word\n"
    file.chmod(0o660)
    with pytest.raises(SecurityError, match="chmod 600"):
        read_secret("tls_key", str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("read", [read_secret, read_public])
def test_a_file_of_somebody_else_is_refused(file: Path, read: type[object]) -> None:
    os.chown(file, 4_242, -1)
    with pytest.raises(SecurityError, match="belongs to user 4242"):
        read("tls_key", str(file))  # type: ignore[call-arg]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"tls_ca = .*none: No such file"):
        read_public("tls_ca", str(tmp_path / "none"))
    with pytest.raises(SecurityError, match="Is a directory"):
        read_public("tls_ca", str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecurityError, match="not a regular file"):
        read_public("tls_ca", str(tmp_path / "pipe"))


def test_a_link_counts_as_what_it_leads_to(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_secret("tls_key", str(link)) == b"word\n"
    file.chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        read_secret("tls_key", str(link))


def test_a_huge_file_is_refused(file: Path) -> None:
    os.truncate(file, FILE_BYTES_MAX + 1)
    with pytest.raises(SecurityError, match="larger than 4 MiB"):
        read_secret("tls_key", str(file))


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"\xff\n"])
def test_a_word_is_one_line(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(SecurityError, match="one line of printable ASCII"):
        read_word("token_file", str(file))
