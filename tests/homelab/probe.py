"""Small programs that tests run on the devices of a lab.

serve NAME              reply to every line on port 9000 with NAME and the line; after a line 'take' only count bytes
ask HOST WAIT [CONNECT] connect, send each line of standard input, and print the reply with its time, or 'timeout';
                        WAIT is the timeout in seconds of a line, and of connecting unless CONNECT is given
rate HOST SECONDS       print the megabits per second that HOST receives
burn SECONDS            compute this long; print CPU seconds per second
hog BYTES               allocate memory up to BYTES or until killed
announce NAME           announce NAME by mDNS
browse                  print each NAME that is announced
"""

# ruff: noqa: T201
from __future__ import annotations

import socket
import sys
import threading
import time

PORT = 9000
SERVICE = "_homelab._tcp.local."


def serve(name: str) -> None:
    listener = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, name), daemon=True).start()


def _answer(connection: socket.socket, name: str) -> None:
    with connection, connection.makefile("rwb") as stream:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in stream:
            if line == b"take\n":
                taken = 0
                while piece := stream.read1(1 << 20):
                    taken += len(piece)
                line = b"%d\n" % taken
            stream.write(name.encode() + b" " + line)
            stream.flush()


def ask(host: str, wait: str, connect: str | None = None) -> None:
    with (
        socket.create_connection((host, PORT), float(connect or wait)) as connection,
        connection.makefile("rb") as answers,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print("ready", flush=True)
        for line in sys.stdin:
            connection.settimeout(float(wait))
            start = time.perf_counter()
            connection.sendall(line.encode())
            try:
                answer = answers.readline().decode().strip()
            except TimeoutError:
                print("timeout", flush=True)
                return
            print(f"{answer} {time.perf_counter() - start:.6f}", flush=True)


def rate(host: str, seconds: str) -> None:
    block = bytes(1 << 16)
    with socket.create_connection((host, PORT), 10) as connection, connection.makefile("rb") as answers:
        connection.sendall(b"take\n")
        start = time.perf_counter()
        while time.perf_counter() - start < float(seconds):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        taken = int(answers.readline().split()[-1])
        print(taken * 8 / 1e6 / (time.perf_counter() - start), flush=True)


def burn(seconds: str) -> None:
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < float(seconds):
        sum(range(1000))
    print((time.process_time() - used) / (time.perf_counter() - start), flush=True)


def hog(maximum: str) -> None:
    held = []
    print("ready", flush=True)
    while len(held) << 20 < int(maximum):
        held.append(b"x" * (1 << 20))
    print("had all", flush=True)


def announce(name: str) -> None:
    import zeroconf

    info = zeroconf.ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=PORT,
        addresses=[socket.inet_aton(socket.gethostbyname(socket.gethostname()))],
    )
    found = zeroconf.Zeroconf(ip_version=zeroconf.IPVersion.V4Only)
    found.register_service(info)
    print("ready", flush=True)
    sys.stdin.read()


def browse() -> None:
    import zeroconf

    class Listener(zeroconf.ServiceListener):
        def add_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
            print(f"found {name.removesuffix('.' + SERVICE)}", flush=True)

        def update_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
            return

        def remove_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
            return

    found = zeroconf.Zeroconf(ip_version=zeroconf.IPVersion.V4Only)
    zeroconf.ServiceBrowser(found, SERVICE, Listener())
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    programs = {
        "serve": serve,
        "ask": ask,
        "rate": rate,
        "burn": burn,
        "hog": hog,
        "announce": announce,
        "browse": browse,
    }
    programs[sys.argv[1]](*sys.argv[2:])
