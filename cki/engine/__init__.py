"""The engine: text from the weights of a decoder, on CKI's own kernels from prompt to token.

    from cki.engine import LLM, SamplingParams

    llm = LLM("path/or/file.gguf")
    for out in llm.generate(["The capital of France is"], SamplingParams(max_tokens=64)):
        print(out.text, out.stats)

See docs/engine.md.
"""

from cki.engine.config import ModelConfig
from cki.engine.files import ModelFiles, open_model
from cki.engine.llm import LLM, Generation
from cki.engine.output import Chunk, RequestOutput, Stats, TokenLogprob
from cki.engine.sampling_params import SamplingParams

__all__ = [
    "LLM", "Chunk", "Generation", "ModelConfig", "ModelFiles", "RequestOutput", "SamplingParams", "Stats",
    "TokenLogprob", "open_model",
]  # fmt: skip
