"""Delayed connections of a bench: the same bytes in the same order, and the same end."""

import socket

from tools.lab.local_ring import slow_links


def test_data_through_a_slow_link_arrives_in_order_and_complete():
    sent, found = b"".join(number.to_bytes(4, "little") for number in range(5000)), b""
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        slow_links([("127.0.0.1", target.getsockname()[1], 0.001)]) as (port,),
        socket.create_connection(("127.0.0.1", port)) as one,
        target.accept()[0] as other,
    ):
        other.sendall(b"back")
        assert one.recv(4) == b"back"
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        while data := other.recv(1 << 16):
            found += data
    assert found == sent
