"""CpuPlatform switches prefix caching and chunked prefill off for every MLA
model unless the CPU has AMX. Put the user's settings back (test process only)."""


def install():
    from vllm.platforms.cpu import CpuPlatform

    orig = CpuPlatform.check_and_update_config.__func__

    def wrapped(cls, vllm_config):
        s, c = vllm_config.scheduler_config, vllm_config.cache_config
        saved = (s.enable_chunked_prefill, c.enable_prefix_caching, s.max_num_batched_tokens)
        orig(cls, vllm_config)
        (s.enable_chunked_prefill, c.enable_prefix_caching, s.max_num_batched_tokens) = saved

    CpuPlatform.check_and_update_config = classmethod(wrapped)
