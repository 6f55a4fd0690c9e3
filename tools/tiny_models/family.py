"""What a tiny model is: a config.json, engine arguments, and what the process that runs it needs."""

import importlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hooks import VARIABLE

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FAMILIES = sorted(
    path.stem
    for path in (HERE / "families").glob("*.py")
    if path.stem not in {"__init__", "common"}
)

# Engine arguments that every tiny model starts from. A family's own, then the caller's, go on top.
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    # In bf16 a prefill of one token and one of many differ by rounding, 0.03 in a logprob; in float32 by 1e-6.
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "seed": 0,
}


@dataclass(frozen=True)
class Family:
    """One tiny model."""

    name: str
    config: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    stubs: bool = False  # needs the torchvision stand-in
    env: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path, *, tokenizer: bool = False) -> Path:
        """Write config.json (and a word-level tokenizer, "w17 w5" ↔ [17, 5]) into folder/name; return that folder."""
        model = folder / self.name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.config, indent=1))
        if tokenizer and not (model / "tokenizer.json").exists():
            from .tokenizer import make

            make(model, self.config["vocab_size"])
        return model

    def engine_args(self, **overrides: Any) -> dict[str, Any]:
        """Arguments for vllm.LLM without `model`. An override of None removes the argument."""
        args = {**ENGINE, **self.engine, **overrides}
        return {name: value for name, value in args.items() if value is not None}

    def environment(self, base: dict[str, str] | None = None, **more: str) -> dict[str, str]:
        """The environment of a process that runs this model (in vLLM's own subprocesses too)."""
        env = dict(os.environ if base is None else base)
        paths = [str(ROOT), str(HERE / "plugin")] + ([str(HERE / "stubs")] if self.stubs else [])
        if env.get("PYTHONPATH"):
            paths.append(env["PYTHONPATH"])
        env |= {
            "PYTHONPATH": os.pathsep.join(paths),
            VARIABLE: ",".join([*self.hooks, "dummy_init", "inspect_here"]),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": env.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return env | self.env | more


def load(name: str) -> Family:
    """The family of that name. Raises ValueError with the known names."""
    if name not in FAMILIES:
        raise ValueError(f"no tiny model {name!r}; there are: {', '.join(FAMILIES)}")
    module = importlib.import_module(f"{__package__}.families.{name}")
    return Family(
        name=name,
        config=module.CONFIG,
        engine=getattr(module, "ENGINE", {}),
        hooks=tuple(getattr(module, "HOOKS", ())),
        stubs=getattr(module, "STUBS", False),
        env=getattr(module, "ENV", {}),
    )


def python() -> str:
    """The interpreter that engine processes run in: this one."""
    return sys.executable
