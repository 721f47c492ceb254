"""Ports for servers that are told one, where port 0 won't do."""
import pathlib
import random
import socket

ALONE = []


def free_ports(n):
    """`n` ports of 127.0.0.1 that are free and stay so for whoever listens there next: they lie below those that the
    system gives to connections and to port 0, and this process holds a name for each until it ends, so that no
    other test draws the same."""
    low = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = []
    for port in random.SystemRandom().sample(range(low // 3, low), low - low // 3):
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
    raise OSError(f"no {n} free ports from {low // 3} to {low}")
