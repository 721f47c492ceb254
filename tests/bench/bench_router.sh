#!/usr/bin/env bash
# What the router costs: processor time and time of a request, of a message to a client, of a token of a
# node, and its resident memory when idle. The case "router" of front.py.
exec "$(dirname "${BASH_SOURCE[0]}")/bench_front.sh" --case router "$@"
