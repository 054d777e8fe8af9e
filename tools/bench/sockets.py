#!/usr/bin/env python3
"""The speed of plain sockets between two hosts: 16 MiB one way and a short
answer, like the messages of `zero devices`. Prints one JSON object.

  tools/bench/sockets.py            on one host: listens
  tools/bench/sockets.py HOST       on the other: connects, measures
"""

import json
import socket
import sys
import time

PORT = 15999
LARGE = 16 << 20
TIMES = 12
ANSWER = b"01234567"
SECONDS = 60  # after which the other counts as gone


def receive(link, view):
    done = 0
    while done < len(view):
        got = link.recv_into(view[done:])
        if not got:
            sys.exit("sockets.py: the other end is gone")
        done += got


def listen():
    server = socket.create_server(("", PORT))
    server.settimeout(SECONDS)
    link, _ = server.accept()
    link.settimeout(SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(bytearray(LARGE))
    for bytes_there in [len(ANSWER)] * TIMES + [LARGE] * TIMES:
        receive(link, view[:bytes_there])
        link.sendall(ANSWER)


def connect(host):
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=SECONDS)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def measure(host):
    link = connect(host)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    there, back = bytes(LARGE), memoryview(bytearray(len(ANSWER)))

    def best(count):
        """The shortest of the round trips."""
        times = []
        for _ in range(TIMES):
            begin = time.perf_counter()
            link.sendall(memoryview(there)[:count])
            receive(link, back)
            times.append(time.perf_counter() - begin)
        return min(times)

    latency = best(len(ANSWER)) / 2
    print(json.dumps({"bytes_per_second": LARGE / (best(LARGE) - latency),
                      "latency_us": 1e6 * latency}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        listen()
