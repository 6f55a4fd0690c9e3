"""Gather/scatter kernel for many small ranges, over mapped pinned host memory.

A few programs walk over the ranges, so that the kernel keeps off most of the multiprocessors: the
link to the host is the limit, and a handful of them fill it. Importing this needs Triton.
"""

import triton
import triton.language as tl

PROGRAMS = 16
WORDS = 1024
"""8-byte words that a program moves at a time."""


# Compiled once: without the list there would be other variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def copy_ranges(sources, targets, sizes, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803
    """Copy ``sizes[i]`` bytes (a multiple of 8) from ``sources[i]`` to ``targets[i]``, i < count."""
    offsets = tl.arange(0, WORDS)
    job = tl.program_id(0)
    while job < count:
        source = tl.load(sources + job).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + job).to(tl.pointer_type(tl.int64))
        words = tl.load(sizes + job) // 8
        for start in range(0, words, WORDS):
            at = start + offsets
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)
        job += tl.num_programs(0)
