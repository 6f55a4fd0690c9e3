"""What engines and the server must agree on: messages, chunk keys, group rules, the namespace's descriptor."""
