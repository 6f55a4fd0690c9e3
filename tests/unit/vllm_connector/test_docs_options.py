"""Commands of the docs that need a GPU are not run; that their options exist, vLLM itself says."""

from tests.unit.docs_pages import shell_blocks

# Of the API server; asking it for its parser takes half a minute.
OF_THE_SERVER = {"--host", "--port"}


def test_options_of_the_engine_exist() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    known = set(parser._option_string_actions) | OF_THE_SERVER
    given = [
        (block.where, word.partition("=")[0].partition(".")[0])
        for block in shell_blocks()
        for words in block.commands()
        if "serve" in words and words[words.index("serve") - 1] == "vllm"
        for word in words
        if word.startswith("--")
    ]

    assert len(given) > 20
    assert [found for found in given if found[1] not in known] == []
    assert "--mamba-cache-mod" not in known  # so that a misspelt one would be found
