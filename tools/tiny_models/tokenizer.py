"""A word-level tokenizer beside a config.json, so that text and chosen token ids map one to one."""

from pathlib import Path


def make(model: Path, vocab_size: int) -> None:
    """Write tokenizer files into `model`: the text "w17 w5" is the ids [17, 5], for ids from 3 up."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins with spaces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        model_max_length=8192,
    )
    fast.save_pretrained(model)
    if fast.encode("w17 w5", add_special_tokens=False) != [17, 5]:
        raise RuntimeError("the tokenizer library does not keep words and ids apart")
