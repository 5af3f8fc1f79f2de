"""Greedy decoding by plain transformers, with KV that other weights may have computed. Runs inside the SGLang environment.

Reads jobs and writes answers, one a line of JSON, until its input ends.

Job: [{"prompt": [id], "output": [id], "parts": [[checkpoint folder, start, end, fresh]]}]. Parts follow one another over the
output. A fresh part computes everything before it anew, with its own weights, as after a prefill; one that is not goes on from
the KV that the parts before it left. Answer: per sequence {"leads": [], "logprobs": []}, one number per output token. The lead is
that token's logit minus the best other one: positive, it is the greedy token; greedy decoding gives the same tokens exactly when
all are, because each is asked for behind the tokens before it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import sglang_torch_cpu  # noqa: F401  first: transformers imports torchvision
import torch
from transformers import DynamicCache, LlamaForCausalLM


@functools.cache
def model(folder: str) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def decode(sequence: dict[str, Any]) -> dict[str, list[float]]:
    ids = torch.tensor([sequence["prompt"] + sequence["output"]])
    prompt_tokens = len(sequence["prompt"])
    leads: list[float] = []
    logprobs: list[float] = []
    cache = DynamicCache()
    for folder, start, end, fresh in sequence["parts"]:
        if start != len(leads):
            raise ValueError(f"a part starts at {start}, behind {len(leads)} tokens")
        if fresh:
            cache = DynamicCache()
        # The last token is never computed: nothing is sampled behind it. The next part computes it.
        begin, stop = cache.get_seq_length(), prompt_tokens + end - 1
        answer = model(folder)(ids[:, begin:stop], past_key_values=cache, use_cache=True)
        logits = answer.logits[0, prompt_tokens + start - 1 - begin :].double()
        taken = ids[0, prompt_tokens + start : prompt_tokens + end, None]
        own = logits.gather(1, taken)[:, 0]
        others = logits.scatter(1, taken, -torch.inf).amax(1)
        leads += (own - others).tolist()
        logprobs += (own - logits.logsumexp(1)).tolist()
    if len(leads) != len(sequence["output"]):
        raise ValueError(f"parts cover {len(leads)} of {len(sequence['output'])} tokens")
    return {"leads": leads, "logprobs": logprobs}


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # libraries print to the other
    with torch.inference_mode():
        for line in sys.stdin:
            answers.write(json.dumps([decode(sequence) for sequence in json.loads(line)]) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
