"""What the tests and the long-running tools share: a server and simulated engines under faults. Imports no test."""
