"""Ports for servers that are told one, where port 0 won't do."""
import pathlib
import random
import socket

ALONE = []


def free_ports(n):
    """`n` ports of 127.0.0.1 that are free and stay so for whoever listens there next: they lie beside those that the
    system gives to connections and to port 0, and this process holds a name for each until it ends, so that no
    other test draws the same."""
    low, high = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # Where the system gives away nearly all of them, any has to do.
    room = range(10000, low) if low > 12000 else range(high + 1, 65536) if high < 64000 else range(10000, 65536)
    ports = []
    for port in random.SystemRandom().sample(room, len(room)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0baton-tests-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
            continue
        ALONE.append(name)
        ports.append(port)
        if len(ports) == n:
            return ports
    raise OSError(f"no {n} free ports in {room}")
