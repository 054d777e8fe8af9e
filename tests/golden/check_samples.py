#!/usr/bin/env python3
"""transformers' results for a folder that zero wrote, as JSON.

The mean loss of the completions of JSON lines, each sample alone in fp32; a greedy
continuation; the warnings from loading the model, its tokenizer and its generation config.
"""

import argparse
import contextlib
import io
import json
import logging
import pathlib
import warnings

import torch
import transformers


def ids_of(tokenizer, sample: dict, end: int) -> tuple[list[int], int]:
    """A sample's tokens, the end of text included, and how many are its prompt's."""
    prompt = tokenizer(sample["prompt"]).input_ids
    completion = tokenizer(sample["completion"], add_special_tokens=False).input_ids
    return prompt + completion + [end], len(prompt)


@torch.no_grad()
def mean_loss(model, tokenizer, path: pathlib.Path, end: int) -> dict:
    total, count = 0.0, 0
    for line in path.read_text().splitlines():
        ids, prompt = ids_of(tokenizer, json.loads(line), end)
        logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        targets = torch.tensor(ids[1:])
        total += torch.nn.functional.cross_entropy(
            logits.double()[prompt - 1:], targets[prompt - 1:], reduction="sum").item()
        count += len(ids) - prompt
    return {"loss": total / count, "tokens": count}


@torch.no_grad()
def continuation(model, tokenizer, prompt: str, length: int, end: int) -> str:
    """Greedy, by hand, ignoring the generation config."""
    ids = tokenizer(prompt).input_ids
    added: list[int] = []
    while len(added) < length:
        logits = model(input_ids=torch.tensor([ids + added])).logits[0, -1]
        if (token := logits.argmax().item()) == end:
            break
        added.append(token)
    return tokenizer.decode(added)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--samples", type=pathlib.Path, required=True)
    parser.add_argument("--end", type=int, required=True, help="id of the end of text")
    parser.add_argument("--prompt", default="12+12=")
    parser.add_argument("--tokens", type=int, default=12)
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    transformers.logging.disable_default_handler()
    said = io.StringIO()
    transformers.logging.add_handler(logging.StreamHandler(said))
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(said):
        warnings.simplefilter("always")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            args.folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder, local_files_only=True)
        generation = model.generation_config
    model.eval()
    result = mean_loss(model, tokenizer, args.samples, args.end)
    result["text"] = continuation(model, tokenizer, args.prompt, args.tokens, args.end)
    result["eos_token_id"] = generation.eos_token_id
    result["wrong_tensors"] = {kind: sorted(map(str, keys))
                               for kind, keys in report.items() if keys}
    result["warnings"] = said.getvalue() + "".join(str(w.message) + "\n" for w in caught)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
