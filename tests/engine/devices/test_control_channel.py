"""Texts between the hosts of processes."""

import socket
import threading

import pytest

from ipu_pipeline.engine.devices.links import ControlChannel


@pytest.fixture
def make():
    """Makes channels by the number of the process."""
    made = []

    def make_one(process, check=lambda: None):
        made.append(ControlChannel(process, "127.0.0.1", check))
        return made[-1]

    yield make_one
    for channel in made:
        for one in (channel._server, *channel._sockets.values()):
            one.close()


def test_texts_come_in_order_whatever_else_connects(make):
    low, high, other = make(0), make(1), make(2)
    addresses = [low.address, high.address]
    host, port, secret = low.address
    strangers = [socket.create_connection((host, port)) for _number in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(40))
    strangers[1].close()
    other._connect(0, lambda _peer: (host, port, secret[::-1]))  # it has not read the store
    texts = ["", "a", "ü" * 100_000]
    sending = threading.Thread(target=lambda: [high.send(0, addresses.__getitem__, text) for text in texts])
    sending.start()
    assert [low.receive(1, addresses.__getitem__) for _text in texts] == texts
    sending.join()
    low.send(1, addresses.__getitem__, "back")
    assert high.receive(0, addresses.__getitem__) == "back"
    assert list(low._sockets) == [1]
    high._sockets[0].close()
    with pytest.raises(OSError, match="closed its connection"):
        low.receive(1, addresses.__getitem__)
    strangers[0].close()


def test_who_waits_looks_whether_the_others_live(make, monkeypatch):
    monkeypatch.setattr("ipu_pipeline.engine.devices.links._CHANNEL_SLICE", 0.01)

    def check():
        raise LookupError("Process 1 has died.")

    with pytest.raises(LookupError):
        make(0, check).receive(1, {}.__getitem__)
