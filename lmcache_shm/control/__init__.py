"""SOCKET: the control socket. Prefix keys, slot numbers and leases; never payload bytes."""
