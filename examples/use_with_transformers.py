"""A Hugging Face model whose attention runs in CKI's kernels: prefill, decoding and padding, with its own caches.

The model is small and of random weights, so that nothing is downloaded; a real one takes
`from_pretrained(..., attn_implementation="cki")` just so.  With no GPU the same lines run on CPU tensors through the
simulated device.
"""

from __future__ import annotations

import torch
import transformers

import cki
from cki.adapters.transformers import register


def main() -> None:
    on_gpu = torch.cuda.is_available()
    place, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(place, dtype).eval()
    register()

    ids = torch.randint(3, 1000, (2, 12), device=place)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # a shorter prompt, padded on the left
    with torch.inference_mode(), cki.device("cuda" if on_gpu else "sim"):
        theirs = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("cki")
        ours = model(ids, attention_mask=mask).logits
        differences = (ours - theirs)[mask.bool()].abs()
        print("logits:", tuple(ours.shape), ours.dtype, "largest difference", float(differences.max()))
        text = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        print("tokens:", text[:, 12:].tolist())


if __name__ == "__main__":
    main()
