# ruff: noqa: PLC0415  (vLLM is imported piece by piece, after the platform is chosen)
"""Find a model's KV cache groups through vLLM's own configuration, without an engine or weights.

Run as ``python -m lmcache_shm.vllm.probe.resolve REQUEST OUT``; both are paths of JSON files. REQUEST
has ``model``, ``args`` (what would follow ``vllm serve MODEL``) and ``platform`` (``auto``,
``cpu`` or ``cuda:MAJOR.MINOR``); OUT receives :func:`facts`, or ``{"error": …}``. A program of its own
because vLLM's configuration leaves traces in the process (platform, process groups, environment) that a
command line must not inherit.

What happens is what a worker does at start, up to the point where memory is measured:
``vllm serve``'s arguments become a VllmConfig; the model class is instantiated on torch's
``meta`` device (no bytes behind the parameters); the platform fixes the block size for the
attention backends it picked; every layer is asked for its KV cache spec; vLLM groups them.
"""

import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache_shm.vllm.probe import assumed_platform

RECURRENT_ARGS = ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
PLENTY = 1 << 60  # bytes of KV cache memory to plan with; nothing is allocated
ASSUMED_CAPABILITY = (9, 0)


def choose_platform(wanted: str) -> bool:
    """Fix vLLM's platform before it is first asked for. True if the device is only assumed."""
    if wanted == "cpu":
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        return False
    if wanted.startswith("cuda"):
        major, _, minor = (wanted.partition(":")[2] or "9.0").partition(".")
        assumed_platform.assume_cuda((int(major), int(minor or 0)))
        return True
    from vllm.platforms import resolve_current_platform_cls_qualname

    if "Unspecified" in resolve_current_platform_cls_qualname():
        assumed_platform.assume_cuda(ASSUMED_CAPABILITY)
        return True
    return False


def engine_config(model: str, args: list[str]) -> Any:
    """VllmConfig of ``vllm serve MODEL ARGS``; recurrent models get prefix caching, align mode."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

    def build(extra: list[str]) -> Any:
        parsed = parser.parse_args([*args, *extra])
        parsed.model = model
        parsed.load_format = "dummy"
        # vLLM groups the layers of all pipeline stages together, and data-parallel replicas are
        # alike: one stage of one replica has the same groups and needs no other process.
        parsed.pipeline_parallel_size = parsed.data_parallel_size = parsed.nnodes = 1
        return AsyncEngineArgs.from_cli_args(parsed).create_engine_config()

    config = build([])
    if is_recurrent(config) and config.cache_config.mamba_cache_mode == "none":
        config = build(RECURRENT_ARGS)
    return config


@contextmanager
def process_groups(config: Any) -> Iterator[None]:
    """VLLM's process groups of rank 0, on torch's in-process ``fake`` backend.

    Layers ask for the size of their group and never send a message while they are built, so a
    tensor-parallel layout of any size is resolved in one process.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    dist.init_process_group("fake", rank=0, world_size=parallel.world_size, store=FakeStore())
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")

    class SilentGroup(parallel_state.GroupCoordinator):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"use_device_communicator": False, "use_message_queue_broadcaster": False}
            super().__init__(*args, **kwargs)

    parallel_state.GroupCoordinator = SilentGroup
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(parallel.world_size, 0, "env://", 0, "fake")
        parallel_state.ensure_model_parallel_initialized(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        )
    yield
    dist.destroy_process_group()


def instantiate(config: Any, *, assumed: bool) -> Any:
    """The model's modules with parameters on the meta device: layers register themselves."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    class WithoutBytes(TorchFunctionMode):
        """New tensors go to meta; those that a layer asks to have on the CPU stay there."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func in _device_constructors() and str(kwargs.get("device")) != "cpu":
                kwargs["device"] = torch.device("meta")
            return func(*args, **kwargs)

    get_model_architecture(config.model_config)  # imports the model's module
    if assumed:
        assumed_platform.kernels_stand_in()
    if not current_platform.is_cpu():
        init_workspace_manager(torch.device("meta"))  # as the GPU's model runner before it loads
    with set_default_torch_dtype(config.model_config.dtype), WithoutBytes():
        return initialize_model(vllm_config=config, model_config=config.model_config)


def layer_specs(config: Any) -> dict[str, Any]:
    """KV cache spec of every layer that has its own cache, as a worker reports them."""
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    specs: dict[str, Any] = {}
    with set_current_vllm_config(config):
        for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
            if getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            spec = layer.get_kv_cache_spec(config)
            if spec is None:
                continue
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            specs[name] = spec
    return specs


def kv_cache_config(config: Any, specs: dict[str, Any]) -> Any:
    """The worker's KVCacheConfig, with the resolved layout, hash size and hit alignment."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core import kv_cache_utils as kcu
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(config)
    with set_current_vllm_config(config):
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends(config))]
        layout = resolve_kv_cache_layout(config, [layouts], list(specs.values()))
        configs = kcu.get_kv_cache_configs(config, [specs], [PLENTY])
    (result,) = configs
    result.kv_cache_layout = layout.name
    cacheable = result.prefix_cacheable_groups or result.kv_cache_groups
    if cacheable:
        config.cache_config.block_size = min(g.kv_cache_spec.block_size for g in cacheable)
        # The scheduler sees one spec a group; these two functions want its view.
        view = kcu.generate_scheduler_kv_cache_config(configs)
        scheduler, hashing = kcu.resolve_kv_cache_block_sizes(view, config)
        result.hash_block_size = hashing
        result.cache_hit_alignment_tokens = kcu.resolve_cache_hit_alignment_tokens(
            view, config, scheduler, hashing
        )
    return result


def resolve(model: str, args: list[str], wanted_platform: str = "auto") -> dict[str, Any]:
    """Everything of one request; the keys are those of `facts`."""
    assumed_platform.events_without_cuda()
    assumed = choose_platform(wanted_platform)
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = engine_config(model, args)
    with process_groups(config):
        model_object = instantiate(config, assumed=assumed)
        current_platform.update_block_size_for_backend(config)
        result = facts(config, kv_cache_config(config, layer_specs(config)), assumed=assumed)
        del model_object
    return result | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


# ------------------------------------------------------------------------------- what is reported
def is_recurrent(config: Any) -> bool:
    """True for models with Mamba, GDN, short-conv or other recurrent layers."""
    model = config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


def backends(config: Any) -> list[Any]:
    """Distinct attention backends of all layers, as the platform chose them."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return list(get_current_attn_backends(config))


def group_facts(
    index: int, group: Any, *, cacheable: bool, context_parallel: int
) -> dict[str, Any]:
    """What a person or a test wants to know of one KV cache group (sizes in tokens and bytes)."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs

    specs = [*iter_layer_specs(group.kv_cache_spec)]
    per_layer = specs if len(specs) == len(group.layer_names) else specs * len(group.layer_names)
    windows = {getattr(s, "sliding_window", None) for s in specs}
    chunks = {getattr(s, "attention_chunk_size", None) for s in specs}
    return {
        "group": index,
        "kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
        "spec": type(group.kv_cache_spec).__name__,
        "window": windows.pop() if len(windows) == 1 else None,
        "attention_chunk": chunks.pop() if len(chunks) == 1 else None,
        "block_size": group.kv_cache_spec.block_size,
        # What a block id covers: context parallelism spreads a block's tokens over ranks.
        "tokens_per_block": resolve_dcp_kv_block_size(group.kv_cache_spec, context_parallel),
        "layers": list(group.layer_names),
        # Content bytes of one block in all layers; padding is not copied and not counted.
        "content_bytes": sum(
            getattr(s, "real_page_size_bytes", s.page_size_bytes) for s in per_layer
        ),
        "page_bytes": sum(s.page_size_bytes for s in per_layer),
        "cacheable": cacheable,
    }


def sizes(groups: Any, context_parallel: int) -> dict[str, Any]:
    """What the connector would make of these groups: N and chunk sizes, or why it refuses them."""
    from lmcache_shm.client.plan import (
        ModelError,
        admissible_sizes,
        auto_chunk_size,
        unified_block_size,
    )
    from lmcache_shm.vllm.groups import kv_groups

    found: dict[str, Any] = {"n": 0, "chunk_sizes": [], "auto_chunk": 0, "refusal": ""}
    try:
        cached, _ = kv_groups(groups, context_parallel)
        if not cached:
            raise ModelError("no KV cache group of this model can be cached")
        found["n"] = unified_block_size(cached)
        found["auto_chunk"] = auto_chunk_size(cached)
        found["chunk_sizes"] = admissible_sizes(cached)
    except ModelError as error:
        found["refusal"] = str(error)
    return found


def facts(config: Any, groups: Any, *, assumed: bool) -> dict[str, Any]:
    """The result of one resolution, ready for JSON."""
    import vllm
    from vllm.platforms import current_platform

    cache, parallel = config.cache_config, config.parallel_config
    cacheable = set(groups.prefix_cacheable_group_ids)
    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "device": current_platform.get_device_name(),
        "device_assumed": assumed,
        "architecture": config.model_config.architecture,
        "recurrent": is_recurrent(config),
        "mamba_cache_mode": cache.mamba_cache_mode,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": cache.block_size,
        "hash_block_size": groups.hash_block_size,
        "hit_alignment": groups.cache_hit_alignment_tokens,
        "layout": groups.kv_cache_layout,
        "tensor_parallel": parallel.tensor_parallel_size,
        "context_parallel": parallel.decode_context_parallel_size,
        "kv_tp_replicas": groups.kv_tp_replicas,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.cache_dtype,
        "backends": [b.get_name() for b in backends(config)],
        **sizes(groups, parallel.decode_context_parallel_size),
        "groups": [
            group_facts(
                i,
                g,
                cacheable=i in cacheable,
                context_parallel=parallel.decode_context_parallel_size,
            )
            for i, g in enumerate(groups.kv_cache_groups)
        ],
    }


# ------------------------------------------------------------------------------- the program
def main(request_path: str, out_path: str) -> int:
    request = json.loads(Path(request_path).read_text())
    try:
        result = resolve(request["model"], request["args"], request["platform"])
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the user's answer
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(out_path).write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
