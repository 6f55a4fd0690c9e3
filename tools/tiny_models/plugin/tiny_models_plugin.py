"""A vLLM plugin found through PYTHONPATH: applies the hooks named in $TINY_MODELS_HOOKS in every vLLM process."""


def register() -> None:
    """Called by vLLM in the engine's and in each worker's process, possibly more than once."""
    from tools.tiny_models.hooks import install_named

    install_named()
