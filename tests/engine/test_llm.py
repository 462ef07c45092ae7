"""LLM: answers equal to the definition's, whatever runs beside them; text, stops, seeds, logprobs, threads, errors."""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from cki.engine import LLM, Chunk, Generation, ModelConfig, SamplingParams
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.engine.decoder_definition import decoder
from tests.engine.model_files import hf_config, write_folder
from tests.engine.sampling_definition import log_softmax
from tests.engine.tiny import LLAMA, Letters, random_weights

WEIGHTS = random_weights(LLAMA)
BLOCK = (
    2 * LLAMA.num_layers * 4 * LLAMA.num_kv_heads * LLAMA.head_dim * 4
)  # bytes of a block of 4 tokens in f32
PROMPTS = ["Hello, world", "a", "The quick brown fox jumps over", "Hello, worm"]


def llm_on(kind: str, blocks: int = 200, **options) -> LLM:
    sizes = {"max_length": 64, "max_sequences": 4, "max_step_tokens": 16, "block_size": 4} | options
    return LLM.from_weights(
        LLAMA, WEIGHTS, Letters(), dtype="f32", device=kind, **({"cache_nbytes": blocks * BLOCK} | sizes)
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return llm_on("sim")


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(WEIGHTS, LLAMA, np.array(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_answers_of_a_crowded_cache(device):
    """More requests than run at a time, too few blocks for those that do: preempted, shared, and right."""
    llm = llm_on(device.kind, blocks=21)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs):
        ids = Letters().encode(prompt)
        assert output.prompt_token_ids == tuple(ids)
        assert list(output.token_ids) == greedy(ids, 16)
        assert output.text == Letters().decode(output.token_ids)
        assert (output.finish_reason, output.stop) == ("length", None)
        assert output.stats.new_tokens == output.new_tokens == 16
        assert output.stats.prefill_len == len(ids)
        assert output.stats.elapsed_s >= output.stats.time_to_first_token_s > 0
        assert output.stats.ms_per_tok == pytest.approx(1e3 / output.stats.tok_per_sec)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert llm.model.cache.blocks_used == 0


def test_graphs_and_eager_steps_give_the_same_bits(device):
    params = [
        SamplingParams(max_tokens=12, temperature=0.9, seed=n, logprobs=2, ignore_eos=True) for n in range(4)
    ]
    first, second = (llm_on(device.kind, graphs=graphs).generate(PROMPTS, params) for graphs in (True, False))
    for one, other in zip(first, second):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


def test_a_seed_gives_the_same_answer_alone_and_in_company(llm):
    params = [
        SamplingParams(max_tokens=10, temperature=1.2, top_p=0.95, seed=n, ignore_eos=True)
        for n in (7, 7, 8, 9)
    ]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[2]]
    together = llm.generate(prompts, params)
    alone = llm.generate(prompts[3], params[3])[0]
    assert together[0].token_ids == together[1].token_ids != together[2].token_ids
    assert together[3].token_ids == alone.token_ids
    assert together[3].stats.seed == 9


def test_without_a_seed_answers_differ_and_can_be_repeated(llm):
    params = SamplingParams(max_tokens=16, temperature=2.0, ignore_eos=True)
    one, other = llm.generate([PROMPTS[0]] * 2, params)
    assert one.token_ids != other.token_ids
    again = llm.generate(PROMPTS[0], SamplingParams(16, 2.0, seed=one.stats.seed, ignore_eos=True))[0]
    assert again.token_ids == one.token_ids


def test_chunks_are_the_text_in_pieces(llm):
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    generation = llm.submit(PROMPTS[2], params)
    chunks = list(generation)
    output = generation.result()
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
    assert len(chunks) == 9
    assert generation.is_finished


def test_stop_texts_end_an_answer_and_are_cut_off(llm):
    whole = llm.generate(PROMPTS[2], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    stop = whole.text[5:8]
    output = llm.generate(PROMPTS[2], SamplingParams(max_tokens=20, stop=["\0never", stop], ignore_eos=True))[
        0
    ]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]


def test_tokens_end_an_answer(llm):
    whole = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    stop = whole.token_ids[4]
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, stop_token_ids=[stop], ignore_eos=True))[
        0
    ]
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop) == ("stop", stop)


def test_end_tokens_that_no_model_brings_end_nothing(llm, monkeypatch):
    whole = llm.generate(PROMPTS[0], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    monkeypatch.setattr(llm, "config", replace(llm.config, eos_ids=(2**40,)))
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=6))[0].token_ids == whole.token_ids


def test_logprobs_are_the_model_s(llm):
    prompt = Letters().encode(PROMPTS[0])
    output = llm.generate(
        PROMPTS[0], SamplingParams(5, temperature=1.0, seed=1, logprobs=3, ignore_eos=True)
    )[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 5
    logits = decoder(WEIGHTS, LLAMA, np.array([*prompt, *output.token_ids]))
    for number, (token, entry) in enumerate(zip(output.token_ids, output.logprobs)):
        shares = log_softmax(logits[len(prompt) - 1 + number])
        assert entry.token == token
        assert entry.logprob == pytest.approx(shares[token], abs=1e-3)
        assert list(entry.alternatives) == np.argsort(-shares)[:3].tolist()
        assert list(entry.alternatives.values()) == pytest.approx(np.sort(shares)[::-1][:3], abs=1e-3)
    assert llm.generate(PROMPTS[0], SamplingParams(2))[0].logprobs is None


def test_a_repetition_penalty_keeps_tokens_from_coming_again(llm):
    output = llm.generate(PROMPTS[0], SamplingParams(20, repetition_penalty=1e6, ignore_eos=True))[0]
    all_tokens = [*set(output.prompt_token_ids), *output.token_ids]
    assert len(set(all_tokens)) == len(all_tokens)


def test_the_longest_sequence_ends_an_answer(llm):
    output = llm.generate([list(range(60))], SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert len(output.token_ids) == 4
    assert output.finish_reason == "length"


def test_aborted(llm):
    generation = llm.submit(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(3):
        next(generation)
    generation.abort()
    output = generation.result()
    assert output.finish_reason == "abort"
    assert 3 <= len(output.token_ids) < 50
    assert list(output.token_ids) == greedy(list(output.prompt_token_ids), len(output.token_ids))


def test_a_request_that_nobody_holds_ends(llm):
    generation = llm.submit(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(generation)
    request = generation._request
    del generation
    llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))
    assert request.finish_reason == "abort"
    assert llm.model.cache.blocks_used == 0


def test_requests_from_several_threads(llm):
    results: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        params = SamplingParams(max_tokens=6 + number, ignore_eos=True)
        results[number] = llm.submit(PROMPTS[number], params).result().token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tokens in results.items():
        assert list(tokens) == greedy(Letters().encode(PROMPTS[number]), 6 + number)
    assert len(results) == 4


def test_a_reader_gets_the_chunk_that_another_thread_brings_while_it_looks():
    class Ending:
        """Its last chunk comes between a reader's two looks: at the chunks, and at whether it is finished."""

        def __init__(self) -> None:
            self.chunks: deque[Chunk] = deque()
            self.error = None
            self.brought = False

        @property
        def is_finished(self) -> bool:
            if not self.brought:
                self.chunks.append(Chunk("end", (1,)))
            self.brought = True
            return True

    assert [chunk.text for chunk in Generation(None, Ending())] == ["end"]


def test_warming_up_compiles_what_the_prompts_need(device):
    llm = llm_on(device.kind)
    llm.warm_up(PROMPTS[:3])
    compiled = set(llm.model._programs)
    assert len(compiled) == 2
    llm.generate(PROMPTS[:3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert compiled <= set(llm.model._programs)
    assert llm.model.cache.blocks_used == 0
    llm.warm_up([])
    llm.warm_up("a")


def test_weights_can_come_from_a_function(llm):
    """Tensors are filled on the device: the same model without a copy on the host."""
    from cki.engine.device_weights import source_names

    def fill(role, tensor):
        tensor.numpy()[...] = np.concatenate([WEIGHTS[name] for name in source_names(role)])

    other = LLM.from_weights(
        LLAMA, fill, Letters(), dtype="f32", device="sim", max_length=64, max_sequences=2
    )
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert other.generate(PROMPTS[1], params)[0].token_ids == llm.generate(PROMPTS[1], params)[0].token_ids


def test_a_chat_is_its_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, SamplingParams(max_tokens=2, ignore_eos=True)).result()
    assert output.prompt_token_ids == tuple(map(ord, "user:Hi\n"))


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], InvalidArgumentError, "0 tokens, not 1 to 63\n  hint: a prompt of at least one token"),
        ([True, 5], InvalidTypeError, "neither a text nor"),
        ([5] * 64, InvalidArgumentError, "64 tokens, not 1 to 63"),
        ([5, 128], InvalidArgumentError, "token 128 is not in the vocabulary of 128"),
        ([0.5], InvalidTypeError, "neither a text nor"),
    ],
)
def test_prompts_that_are_refused(llm, prompt, error, match):
    with pytest.raises(error, match=match):
        llm.submit(prompt)


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"max_tokens": 0, "top_p": 0.0}, InvalidArgumentError, r"(?s)max_tokens is 0.*top_p is 0\.0"),
        ({"temperature": 1e300, "top_k": -2}, InvalidArgumentError, r"(?s)temperature is 1e\+300.*top_k is -2"),
        ({"temperature": -1.0}, InvalidArgumentError, "temperature is -1"),
        ({"temperature": float("nan")}, InvalidArgumentError, "temperature is nan"),
        ({"repetition_penalty": 1e-46}, InvalidArgumentError, "repetition_penalty is 1e-46"),
        ({"logprobs": 21}, InvalidArgumentError, "logprobs is 21"),
        ({"stop": [""]}, InvalidArgumentError, "stop is"),
        ({"top_k": 1.5, "seed": "x"}, InvalidTypeError, r"(?s)top_k is 1\.5.*seed is 'x'"),
        ({"stop": 5}, InvalidTypeError, "stop is 5"),
        ({"stop_token_ids": [5, -1]}, InvalidArgumentError, r"stop_token_ids is \[5, -1\]\n.*ids of tokens"),
        ({"stop_token_ids": [2**31]}, InvalidArgumentError, "stop_token_ids is .2147483648"),
    ],
)  # fmt: skip
def test_parameters_that_are_refused(values, error, match):
    with pytest.raises(error, match=match):
        SamplingParams(**values)


def test_params_that_are_none(llm):
    with pytest.raises(InvalidTypeError, match="params is a int, not SamplingParams or a list"):
        llm.generate([[5], [6]], 5)
    with pytest.raises(InvalidTypeError, match="params is a dict, not SamplingParams or a list"):
        llm.generate([[5]], {"max_tokens": 2})


def test_sizes_that_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"(?s)max_sequences is 0.*block_size is 'x'"):
        llm_on("sim", max_sequences=0, block_size="x")
    with pytest.raises(InvalidArgumentError, match="device is 'tpu'"):
        llm_on("tpu")
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)max_length is 513.*sequences of 512 tokens.*at most 512"
    ):
        llm_on("sim", max_length=513)
    with pytest.raises(
        InvalidArgumentError, match=r"the cache has 1 bytes, a block of .*\n  hint: cache_nbytes of"
    ):
        llm_on("sim", cache_nbytes=1)


def test_as_many_params_as_prompts(llm):
    with pytest.raises(InvalidArgumentError, match="2 prompts with 1 params"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_requests_without_params_take_what_the_model_s_authors_recommend(tmp_path):
    values = hf_config(num_attention_heads=6, head_dim=16)
    folder = write_folder(tmp_path, values, random_weights(ModelConfig.from_hf(values)))
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 7, "eos_token_id": [2, 5]}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    llm = LLM(folder, device="sim", max_length=64, max_sequences=2)
    assert llm.default_params == SamplingParams(7, 0.6, 20, 0.9)
    # Two draws with seeds of their own: the same two with the parameters spelled out, but not greedy ones.
    default = llm.generate([[9, 10]])[0]
    spelled = replace(llm.default_params, seed=default.stats.seed)
    assert llm.generate([[9, 10]], spelled)[0].token_ids == default.token_ids
    assert llm.generate([[9, 10]], SamplingParams(7))[0].new_tokens <= 7
    (folder / "generation_config.json").write_text(json.dumps({"top_p": "high"}))
    with pytest.raises(
        InvalidArgumentError, match=r"generation_config.json recommends.*(\n.*)*top_p is 'high'"
    ):
        LLM(folder, device="sim")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, SamplingParams()),
        ({"do_sample": True, "top_k": 50.0}, SamplingParams(temperature=1.0, top_k=50)),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({"top_k": -1, "max_new_tokens": 2048}, SamplingParams(2048, top_k=-1)),
    ],
)  # fmt: skip
def test_recommended_params(stated, expected):
    assert SamplingParams.recommended(stated) == expected


def test_a_generation_config_of_wrong_types_is_refused(tmp_path):
    values = hf_config(num_attention_heads=6, head_dim=16)
    folder = write_folder(tmp_path, values, random_weights(ModelConfig.from_hf(values)))
    for stated, match in (
        ({"eos_token_id": [2, "x"]}, "eos_token_id is"),
        ({"do_sample": "x"}, "do_sample is 'x'"),
    ):
        (folder / "generation_config.json").write_text(json.dumps(stated))
        with pytest.raises(InvalidArgumentError, match=match):
            LLM(folder, device="sim")


def test_the_report_names_what_runs(llm):
    report = llm.backend_report()
    assert "llama: 2 layers of f32 on simulated device" in report
    assert f"{len(llm.model.plan(llm.model.decode_shape(1)).steps)} launches" in report
    assert "x paged_attention: " in report


def test_weights_that_are_not_the_model_s():
    """A square matrix's shape tells nothing; one of K's in the place of Q's had as many elements together with it."""
    weights = random_weights(LLAMA)
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    swapped = {**weights, q: weights[k], k: weights[q]}
    del swapped["model.norm.weight"]
    with pytest.raises(InvalidArgumentError) as caught:
        LLM.from_weights(LLAMA, {**swapped, "lm_tail": np.ones(3, np.float32)}, device="sim")
    assert caught.value.problems == (
        f"{q} has shape (32, 64), the configuration says (96, 64)",
        f"{k} has shape (96, 64), the configuration says (32, 64)",
        "model.norm.weight (64,) is missing",
        "lm_tail has no place in a llama model of this kind",
    )
    for wrong, words in (
        ([1.0] * 64, "a list, not a NumPy array"),
        (np.ones(64, np.int32), "of int32, not f32"),
    ):
        with pytest.raises(InvalidTypeError, match=f"model.norm.weight is {words}"):
            LLM.from_weights(LLAMA, {**weights, "model.norm.weight": wrong}, device="sim")
    with pytest.raises(InvalidTypeError, match="weights is a NoneType"):
        LLM.from_weights(LLAMA, None, device="sim")
    with pytest.raises(InvalidTypeError, match="config is a NoneType, not a ModelConfig"):
        LLM.from_weights(None, weights, device="sim")
    with pytest.raises(InvalidTypeError, match="tokenizer is a int, not a Tokenizer"):
        LLM.from_weights(LLAMA, weights, 5, device="sim")
