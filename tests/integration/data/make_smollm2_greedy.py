"""Make smollm2_greedy.json: transformers' float32 greedy tokens for 32 prompts of 1 to 700 tokens.

Run by hand where transformers and the model are installed; the suite only reads the result. Prompts
are pieces of Python's own documentation. Where the two best logits of a step come closer than
`MIN_GAP`, another piece is taken: a choice between them would depend on the order of float32 sums,
and so on the machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

NEW_TOKENS = 64
MIN_GAP = 2e-3
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 23, 31, 32, 33, 40]
LENGTHS += [47, 63, 64, 65, 80, 100, 127, 128, 129, 160, 200, 255, 257, 320, 500, 700]


def load_reference(path: Path) -> LlamaForCausalLM:
    """The GGUF file as a float32 transformers model."""
    shell = load_gguf_checkpoint(str(path))
    config = LlamaForCausalLM.config_class(**shell["config"])
    model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval()


def greedy(
    model: LlamaForCausalLM, prompt: list[int], new_tokens: int = NEW_TOKENS
) -> tuple[list[int], float]:
    """The next tokens, end of sequence ignored, and the least gap between two best logits."""
    ids, cache, tokens, least = torch.tensor([prompt]), None, [], float("inf")
    with torch.inference_mode():
        for _ in range(new_tokens):
            out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            best = out.logits[0, -1].topk(2)
            least = min(least, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            ids = best.indices[:1].view(1, 1)
    return tokens, least


def main() -> None:
    """Write the fixture beside this file; the argument is the .gguf file."""
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "\n".join(topics[name] for name in sorted(topics)[:12])
    stream = tokenizer(text)["input_ids"]
    model = load_reference(path)
    cases, at = [], 0
    for length in LENGTHS:
        while True:
            prompt = stream[at : at + length]
            at += max(length, 10)
            tokens, gap = greedy(model, prompt)
            if gap >= MIN_GAP:
                break
        cases.append({"prompt": prompt, "tokens": tokens})
        print(length, gap, file=sys.stderr, flush=True)
    target = Path(__file__).with_name("smollm2_greedy.json")
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    target.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
