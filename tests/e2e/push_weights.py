"""A trainer that holds a checkpoint and pushes it to engines. Runs inside the SGLang environment.

    python push_weights.py CHECKPOINT

Reads engines' URLs, one a line, after it said "ready"; says per engine the status and the answer of
`/update_weights_from_tensor` as a line of JSON. An engine must be open for weights.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

import sglang_torch_cpu  # noqa: F401  first: what follows imports torchvision
import torch.multiprocessing
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

ANSWER_SECONDS = 60.0


def push(url: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/update_weights_from_tensor", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def main(checkpoint: str) -> None:
    # By file descriptor, torch's default, the engine dies of tensors of a process that is not its parent.
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = list(load_file(f"{checkpoint}/model.safetensors").items())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        named = MultiprocessingSerializer.serialize(tensors, output_str=True)
        body = {"serialized_named_tensors": [named], "flush_cache": False}
        print(json.dumps(push(line.strip(), json.dumps(body).encode())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
