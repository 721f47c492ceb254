/* How batonctl speaks with a supervisor: a unix socket of type SOCK_SEQPACKET, one JSON object a
 * packet, an answer for each. Only processes of the supervisor's own user are served (SO_PEERCRED).
 *
 *   {"op": "status"}
 *   {"op": "scale", "roles": {"prefill": 3, ...}, "dry_run": false}
 *   {"op": "flip", "name": "decode-1", "to": "prefill", "dry_run": false}
 *   {"op": "canary", "role": "decode", "binary": "/path", "release": "1.1", "replicas": 1,
 * "dry_run": ..}
 *   {"op": "rollback", "role": "decode"}    {"op": "promote", "role": "decode"}
 *
 * Answers: {"ok": true, "stopping": [names that will be stopped], ...}, or
 * {"ok": false, "code": "not_found" | "invalid" | "denied", "error": text}. Status:
 *   {"ok": true, "roles": [{"name", "single", "canary", "release", "replicas", "ready",
 *     "processes": [{"name", "pid", "state", "restarts", "exit", "listen"}]}]} */
#ifndef SV_PROTOCOL_H
#define SV_PROTOCOL_H

#define SV_PACKET_MAX 65536

#endif
