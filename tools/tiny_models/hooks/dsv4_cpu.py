"""vLLM 0.32 CPU bug: DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler
does not know the 'c1a'/'c2a' layer types the shared builder reads."""


def install():
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import sparse_swa

    rest = {v: None for k, v in vars(sparse_swa).items() if k.startswith("_LAYER_TYPE_")}
    cls = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    orig = cls.build_tile_scheduler

    def build_tile_scheduler(self, num_decode_tokens):
        return {**rest, **orig(self, num_decode_tokens)}

    cls.build_tile_scheduler = build_tile_scheduler
