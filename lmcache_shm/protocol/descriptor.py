"""The descriptor of a namespace: everything that must match for bytes to be exchangeable, as canonical bytes."""

import json
from collections.abc import Mapping
from typing import Any


def canonical(facts: Mapping[str, Any]) -> bytes:
    """The descriptor of a namespace: sorted JSON, the same bytes for equal facts."""
    text = json.dumps(
        facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def describe(descriptor: bytes) -> dict[str, Any]:
    """The facts of a descriptor; {"descriptor": hex} if it is none of ours."""
    try:
        facts = json.loads(descriptor)
    except ValueError:
        facts = None
    return facts if isinstance(facts, dict) else {"descriptor": descriptor.hex()}
