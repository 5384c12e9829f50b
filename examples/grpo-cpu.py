"""GRPO of a small random model, which learns to write digits. Needs trl (pip install trl), and no network."""

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, TrlParser

END = "<end>"


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    """Return the reward of each completion: its share of digits."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def main() -> None:
    """Train with the arguments of TRL's GRPOConfig."""
    (config,) = TrlParser(GRPOConfig).parse_args_and_config()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_of = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    bytes_of.pre_tokenizer, bytes_of.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of, eos_token=END, pad_token=END)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM(Qwen2Config(**shape)),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{number} and {number + 1} are " for number in range(1000)]}),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
