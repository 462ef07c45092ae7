"""Three prompts with one beginning in a paged KV cache: it is stored once, and every answer is that of a cache alone.

Runs on the simulated device, without a GPU. One layer with random projections stands for a model: token ids go in,
keys, values and queries come out.
"""

from __future__ import annotations

import numpy as np

import cki
from cki.memory import PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
RNG = np.random.default_rng(0)
K_OF, V_OF = RNG.normal(size=(2, 100, KV_HEADS, DIM)).astype(np.float32)  # of each of 100 tokens
Q_OF = RNG.normal(size=(100, HEADS, DIM)).astype(np.float32)


def run(cache: PagedKVCache, sequence: int, tokens: list[int]) -> np.ndarray:
    """Stores what the cache lacks of a sequence's tokens; attention of the last one, [heads, dim]."""
    new = tokens[cache.length(sequence) :]
    step = cache.prepare_step([sequence], [len(new)])
    k, v, q = K_OF[new], V_OF[new], Q_OF[new]
    q = cki.append_kv(k, v, cache.layer(0), step.slot_mapping, q=q, positions=step.positions, rope_base=1e4)
    out = cki.paged_attention(q[None, -1:], cache.layer(0), step.block_table, step.seq_lens)
    return np.asarray(out[0, 0])


def make_cache(num_blocks: int) -> PagedKVCache:
    """A cache of one layer."""
    return PagedKVCache(1, num_blocks, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK, dtype="f32")


def main() -> None:
    system = list(RNG.integers(0, 100, 40))
    prompts = [[*system, *RNG.integers(0, 100, 5 + 6 * i)] for i in range(3)]
    with cki.device("sim"):
        cache = make_cache(64)
        for prompt in prompts:
            sequence = cache.allocate_sequence(prompt, salt="tenant a")
            shared = cache.length(sequence)
            out = run(cache, sequence, prompt)
            alone = make_cache(32)
            expected = run(alone, alone.allocate_sequence(prompt), prompt)
            print(
                f"{len(prompt)} tokens, {shared} of them shared, {cache.blocks_used} blocks used;",
                "largest difference", abs(out - expected).max(),
            )  # fmt: skip

        other = cache.allocate_sequence(prompts[0], salt="tenant b")
        print(f"the same prompt of another tenant: {cache.length(other)} tokens shared")

        # Four drafts after the last prompt, of which the first two are accepted.
        drafts = [1, 2, 3, 4]
        run(cache, sequence, [*prompt, *drafts])
        cache.truncate(sequence, len(prompt) + 2)
        out = run(cache, sequence, [*prompt, *drafts[:2], 9])
        expected = run(alone, alone.allocate_sequence(), [*prompt, *drafts[:2], 9])
        print("after a rollback: largest difference", abs(out - expected).max())


if __name__ == "__main__":
    main()
