"""Tiny models of real architectures for the real vLLM engine on a CPU, with dummy weights: nothing is downloaded.

`families/` has one hand-written `config.json` per architecture, a few layers wide. `hooks/` patches what
vLLM's CPU backend lacks and, most of all, its dummy initialiser: with the stock one the output hardly depends
on the KV cache, and a test passes with a wrong cache. `sensitivity.py` measures that dependence.

`process.Engine` runs one engine in a process of its own; `runner` is that process. `serve` is `vllm serve`.
"""

from .family import FAMILIES, Family, load

__all__ = ["FAMILIES", "Family", "load"]
