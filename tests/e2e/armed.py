"""Failpoints in the workers of a real engine: `--worker-extension-cls tests.e2e.armed.Armed`."""

import json

from tools.harness import failpoints


class Armed:
    """vLLM makes it a base class of its worker, so that /collective_rpc reaches it in each rank's process."""

    rank: int

    def arm_failpoint(self, rank: str, spec: str) -> None:
        """Arm that failpoint (JSON; null: none) in the process of one rank."""
        failpoints.arm(json.loads(spec) if int(rank) == self.rank else None)
