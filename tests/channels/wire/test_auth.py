"""The handshake: both sides prove the secret, before anything else is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels import HandshakeFailed
from rlinf_async.channels.wire.frames import PROTOCOL_VERSION
from rlinf_async.channels.wire.session.link import MAX_MESSAGE, Handshake, Terms

SECRET = b"0123456789abcdef"


def exchange(client: Handshake, server: Handshake) -> None:
    """Carry messages until both fall silent or one refuses."""
    while True:
        to_server = client.take_outgoing()
        server.feed(to_server)
        to_client = server.take_outgoing()
        if not (to_server or to_client):
            return
        client.feed(to_client)


def refusal(side: Handshake, received: bytes) -> str:
    with pytest.raises(HandshakeFailed) as caught:
        side.feed(received)
    return str(caught.value)


def test_both_sides_learn_the_name_of_the_other() -> None:
    client = Handshake("client", SECRET, "env[0]")
    server = Handshake("server", SECRET, "driver")
    exchange(client, server)
    assert (client.done, client.peer) == (True, "driver")
    assert (server.done, server.peer) == (True, "env[0]")


def test_what_follows_the_handshake_is_kept() -> None:
    client, server = Handshake("client", SECRET, "c"), Handshake("server", SECRET, "s")
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing() + b"first frame")
    assert client.rest == b"first frame"


def test_a_wrong_secret_is_refused_and_both_sides_are_told() -> None:
    client, server = Handshake("client", b"x" * 16, "env[0]"), Handshake("server", SECRET, "driver")
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    said = refusal(server, client.take_outgoing())
    assert said == "the client ('env[0]') was refused: the cluster's secret is wrong"
    assert "the server refused: the cluster's secret is wrong" in refusal(
        client, server.take_outgoing()
    )
    assert not client.done
    assert not server.done


def test_a_server_with_a_wrong_secret_is_refused_by_the_client() -> None:
    client, server = Handshake("client", SECRET, "c"), Handshake("server", b"y" * 16, "s")
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    client.take_outgoing()
    forged = Handshake("server", b"y" * 16, "s")._proof("server")
    said = refusal(client, b"\x02" + len(forged).to_bytes(2, "little") + forged)
    assert "the cluster's secret is wrong" in said


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    client, server = Handshake("client", SECRET, "c", version=9), Handshake("server", SECRET, "s")
    said = refusal(server, client.take_outgoing())
    versions = f"the client speaks 9, the server {PROTOCOL_VERSION}"
    assert versions in said
    assert versions in refusal(client, server.take_outgoing())


def test_a_proof_cannot_be_reflected() -> None:
    client = Handshake("client", SECRET, "c")
    hello = client.take_outgoing()
    client.feed(hello)
    assert "the cluster's secret is wrong" in refusal(client, client.take_outgoing())


def test_a_proof_of_one_connection_is_worth_nothing_on_another() -> None:
    client, server = Handshake("client", SECRET, "c"), Handshake("server", SECRET, "s")
    hello = client.take_outgoing()
    server.feed(hello)
    client.feed(server.take_outgoing())
    proof = client.take_outgoing()
    other = Handshake("server", SECRET, "s")
    other.feed(hello)
    assert "secret is wrong" in refusal(other, proof)


def test_the_secret_does_not_travel() -> None:
    client, server = Handshake("client", SECRET, "c"), Handshake("server", SECRET, "s")
    seen = client.take_outgoing()
    server.feed(seen)
    answer = server.take_outgoing()
    client.feed(answer)
    proof = client.take_outgoing()
    server.feed(proof)
    assert SECRET not in seen + answer + proof + server.take_outgoing()


@given(st.binary(min_size=3, max_size=3 * MAX_MESSAGE))
def test_random_bytes_are_refused_or_wait_for_more(noise: bytes) -> None:
    server = Handshake("server", SECRET, "s")
    try:
        server.feed(noise)
    except HandshakeFailed:
        return
    assert not server.done


def test_a_message_over_the_limit_is_refused_at_once() -> None:
    server = Handshake("server", SECRET, "s")
    assert "does not speak this protocol" in refusal(server, b"\x01\xff\xff")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match=r"5 bytes.*secrets.token_bytes"):
        Handshake("client", b"short", "c")


def test_both_sides_learn_the_terms_of_the_other_and_the_server_gives_its_own_last() -> None:
    asked, settled = Terms(b"n" * 16, 12, 10.0), Terms(b"n" * 16, 34, 5.0)
    order: list[str] = []

    def settle(handshake: Handshake) -> Terms:
        order.append(f"{handshake.peer} is known and asks for {handshake.terms.received}")
        return settled

    client = Handshake("client", SECRET, "env[0]", terms=asked)
    server = Handshake("server", SECRET, "driver", settle=settle)
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    assert order == []
    exchange(client, server)
    assert order == ["env[0] is known and asks for 12"]
    assert (client.terms, server.terms) == (settled, asked)


def test_terms_cannot_be_changed_on_the_way() -> None:
    client = Handshake("client", SECRET, "c")
    server = Handshake("server", SECRET, "s", settle=lambda _: Terms(b"n" * 16, 34, 5.0))
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    server.feed(client.take_outgoing())
    proof = bytearray(server.take_outgoing())
    proof[-10] ^= 1
    assert "secret is wrong" in refusal(client, bytes(proof))


def test_a_server_that_will_not_have_a_peer_tells_it_why() -> None:
    def settle(handshake: Handshake) -> Terms:
        raise handshake.refuse("it is not wanted")

    client = Handshake("client", SECRET, "c")
    server = Handshake("server", SECRET, "s", settle=settle)
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    assert (
        refusal(server, client.take_outgoing()) == "the client ('c') was refused: it is not wanted"
    )
    assert refusal(client, server.take_outgoing()) == "the server refused: it is not wanted"
