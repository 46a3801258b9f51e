"""A mixture of experts in Hugging Face Transformers, asked by a benchmark; runs in an environment that has torch.

    python transformers_child.py MODEL.gguf THREADS

The float32 weights of a GGUF in Mixtral's layout become those of ``MixtralForCausalLM``. For each line of JSON on stdin,
``{"prompt": [...], "tokens": [...]}``, one is printed: for each token how far its logit is below the best one (0: greedy
decoding draws it), seconds of the prompt with the first of them, and seconds of each of the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from gguf import GGUFReader
from transformers import MixtralConfig, MixtralForCausalLM  # type: ignore[import-not-found, unused-ignore]


def load(path: str) -> Any:
    """The model with the weights of the file."""
    reader = GGUFReader(path)

    def number(key: str) -> float:
        return float(reader.fields[key].contents())

    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    layers, heads = int(number("llama.block_count")), int(number("llama.attention.head_count"))
    experts = int(number("llama.expert_count"))
    heads_kv = int(number("llama.attention.head_count_kv"))
    config = MixtralConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=int(number("llama.embedding_length")),
        intermediate_size=tensors["blk.0.ffn_gate_exps.weight"].shape[1],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        num_local_experts=experts,
        num_experts_per_tok=int(number("llama.expert_used_count")),
        rms_norm_eps=number("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("llama.rope.freq_base")},
        max_position_embeddings=4096,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    names = set(model.state_dict())
    weights = dict(_weights(tensors, layers, heads, heads_kv, experts, names.__contains__))
    model.load_state_dict(
        {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in weights.items()}, assign=True
    )
    rotary = model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if "rope_freqs.weight" in tensors:
        rotary.inv_freq /= torch.from_numpy(tensors["rope_freqs.weight"])
    return model.eval()


def _weights(
    tensors: dict[str, Any], layers: int, heads: int, heads_kv: int, experts: int, has: Callable[[str], bool]
) -> Any:
    """Names and weights as Transformers has them; newer versions have all experts of a layer in one tensor."""

    def halves(weight: Any, count: int) -> Any:
        """llama.cpp turns pairs of neighbours, Transformers the halves of a head."""
        rows, columns = weight.shape
        return weight.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

    yield "model.embed_tokens.weight", tensors["token_embd.weight"]
    yield "model.norm.weight", tensors["output_norm.weight"]
    yield "lm_head.weight", tensors["output.weight"]
    for layer in range(layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        yield theirs + "input_layernorm.weight", tensors[ours + "attn_norm.weight"]
        yield theirs + "post_attention_layernorm.weight", tensors[ours + "ffn_norm.weight"]
        yield theirs + "self_attn.q_proj.weight", halves(tensors[ours + "attn_q.weight"], heads)
        yield theirs + "self_attn.k_proj.weight", halves(tensors[ours + "attn_k.weight"], heads_kv)
        yield theirs + "self_attn.v_proj.weight", tensors[ours + "attn_v.weight"]
        yield theirs + "self_attn.o_proj.weight", tensors[ours + "attn_output.weight"]
        gate, up, down = (tensors[f"{ours}ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        if has(theirs + "mlp.experts.gate_up_proj"):
            yield theirs + "mlp.gate.weight", tensors[ours + "ffn_gate_inp.weight"]
            yield theirs + "mlp.experts.gate_up_proj", np.concatenate([gate, up], axis=1)
            yield theirs + "mlp.experts.down_proj", down
            continue
        yield theirs + "block_sparse_moe.gate.weight", tensors[ours + "ffn_gate_inp.weight"]
        for expert in range(experts):
            name = f"{theirs}block_sparse_moe.experts.{expert}."
            yield from (
                (name + "w1.weight", gate[expert]),
                (name + "w3.weight", up[expert]),
                (name + "w2.weight", down[expert]),
            )


def answer(model: Any, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """Each of ``tokens`` behind those before it, with the KV cache: how far its logit is below the best one, and seconds."""
    below, seconds = [], []
    ids, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        for token in tokens:
            start = time.perf_counter()
            found = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            logits = found.logits[0, -1]
            best = logits.max()
            seconds.append(time.perf_counter() - start)
            below.append(float(best - logits[token]))
            ids = torch.tensor([[token]])
    return {"below": below, "first_s": seconds[0], "next_s": seconds[1:]}


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(int(sys.argv[2]))
    model = load(sys.argv[1])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(model, asked["prompt"], asked["tokens"])), flush=True)


if __name__ == "__main__":
    main()
