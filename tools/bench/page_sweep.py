"""Copies of pages of different size and order, beside the models' own."""

from lmcache_shm.cli.bench_transfer import KIB, MIB, LayerGroup, Shape


def page_sweep() -> list[Shape]:
    """The same 32 MiB slot of 32 layers cut into pages of different size and order.

    64 KiB is a block of 16 tokens of 8 KV heads of 128 bf16 with K and V in one run (HND, fused), 512 KiB one
    of 128 tokens; with K and V in tensors of their own (as with NHD) a page is two runs of half the size.
    """
    dense = [
        Shape(f"{kib} KiB pages", 256, (LayerGroup("full", 32, kib * KIB, MIB // (kib * KIB)),))
        for kib in (8, 16, 32, 64, 512)
    ]
    orders = {
        "64 KiB, K and V apart": LayerGroup(
            "full", 32, 64 * KIB, 16, order="heads outermost", heads=2
        ),
        "512 KiB, K and V apart": LayerGroup(
            "full", 32, 512 * KIB, 2, order="heads outermost", heads=2
        ),
        "64 KiB, blocks outermost": LayerGroup("full", 32, 64 * KIB, 16, order="blocks outermost"),
        "64 KiB, 8 heads outermost": LayerGroup(
            "full", 32, 64 * KIB, 16, order="heads outermost", heads=8
        ),
        "1 MiB padded states": LayerGroup("state", 32, MIB - 4160, 1, page_stride=MIB),
    }
    return dense + [Shape(name, 256, (group,)) for name, group in orders.items()]
