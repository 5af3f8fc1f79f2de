"""make_model.py FOLDER --seed N: write a tiny random Llama checkpoint with a byte-level tokenizer.

Same seed, same weights. The tokenizer has fewer entries (about 350) than the model's 1,024, as padded real models do, so
generated ids may have no text.
"""

import argparse

import sglang_torch_cpu  # noqa: F401  first: transformers imports torchvision
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY_SIZE = 1024
CONTEXT_TOKENS = 4096
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SENTENCES = (
    "A trainer asks for rollouts and an engine answers with tokens and log-probs.",
    "Solve the equation step by step, then write the answer: x = 42.",
    "def total(numbers): return sum(number for number in numbers if number > 0)",
    "The user asked a question about the weather; the assistant gave an answer.",
    "0 1 2 3 4 5 6 7 8 9 + - * / = ( ) [ ] { } < > , . ; : ! ?",
)


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer().save_pretrained(arguments.folder)
    model(arguments.seed).save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
