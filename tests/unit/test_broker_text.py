"""Tokenizers from GGUF metadata, chat templates, defaults, and the checks of `prepare`."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as hf_decoders

from broker.actor import ActorSystem
from broker.config import BrokerConfig
from broker.link_messages import EngineUp
from broker.messages import Prepare, Prepared, PrepareFailed
from broker.text.actor import INLINE_CHARS, TextActor
from broker.text.chat import ChatTemplate
from broker.text.detokenizer import Detokenizer
from broker.text.gguf_metadata import read_metadata
from broker.text.gguf_tokenizer import tokenizer_from_gguf
from broker.text.model import Defaults, TextModel, load_text_model
from broker.text.prepare import Limits, check_names, encode_prompt, resolve
from broker.text.vocabulary import byte_to_char, vocabulary_of
from tokenbus.errors import (
    InvalidField,
    TokenbusError,
    TooLong,
    UnknownModel,
    UnknownQueue,
    Unsupported,
)
from tokenbus.request import JobRequest, SamplingParams

CACHE = Path(os.environ.get("TOKENBUS_CACHE", Path.home() / ".cache" / "tokenbus"))
SMOLLM2 = CACHE / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_model = pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not in the cache")

TEXTS = [
    "Hello, world",
    "  two spaces,\ttabs\nand\r\nlines \n\n end ",
    "It's 1234567890 o'clock; we'll see 3.14159 and 10,000",
    "na\u00efve caf\u00e9 \u4f60\u597d \u0645\u0631\u062d",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x" * 300 + " " * 40 + "y",
    "a",
    " ",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> TextModel:
    return load_text_model(str(SMOLLM2))


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)


@needs_model
@pytest.mark.slow
def test_ids_equal_those_of_transformers(smollm2: TextModel, reference: Any) -> None:
    for text in TEXTS:
        ids = smollm2.encoder.encode(text, add_special_tokens=True)
        assert ids.tolist() == reference(text)["input_ids"], text


@needs_model
@pytest.mark.slow
def test_chat_prompts_equal_those_of_transformers(smollm2: TextModel, reference: Any) -> None:
    chats: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n{{ x }}"}],
        [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))],
    ]
    assert smollm2.chat is not None
    for chat in chats:
        rendered = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert smollm2.chat.render(chat) == rendered
        ids = encode_prompt(JobRequest(job="j", messages=tuple(chat)), smollm2)
        assert ids.tolist() == reference(rendered, add_special_tokens=False)["input_ids"]


@needs_model
def test_text_of_all_ids_equals_the_tokenizers_own_decode(smollm2: TextModel) -> None:
    tokenizer = tokenizer_from_gguf(read_metadata(SMOLLM2))
    rng = np.random.default_rng(1)
    for _ in range(50):
        ids = rng.integers(0, smollm2.vocab_size, 60).tolist()
        detok = Detokenizer(smollm2.vocabulary)
        text = "".join(detok.feed([i])[0] for i in ids) + detok.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


@needs_model
def test_the_model_of_a_gguf_file(smollm2: TextModel) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.max_model_len == 8192
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.defaults == Defaults()


# ------------------------------------------------------------ small made-up vocabularies


def byte_level_meta(pre: str, **extra: Any) -> dict[str, Any]:
    tokens = [*byte_to_char().values(), "<s>", "he", "hel", "<tool>"]
    types = [1] * 256 + [3, 1, 1, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "he l"],
        **extra,
    }


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("gpt-2", ["ab", "\u0120123", "\u0120C"]),
        ("smollm", ["ab", "\u0120", "1", "2", "3", "\u0120C"]),
        ("llama-bpe", ["ab", "\u0120", "123", "\u0120C"]),
        ("qwen2", ["ab", "\u0120", "1", "2", "3", "\u0120C"]),
    ],
)
def test_each_pre_tokenizer_splits_words_and_digits_its_own_way(pre: str, split: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_meta(pre))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab 123 C")] == split


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_meta("gpt-2"))
    assert pieces_of(tokenizer, "<s>hello<tool>") == ["<s>", "hel", "l", "o", "<tool>"]
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.texts[256] == ""
    assert vocabulary.texts[259] == "<tool>"


def test_the_begin_token_is_added_where_the_metadata_say_so() -> None:
    extra = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.add_bos_token": True}
    tokenizer = tokenizer_from_gguf(byte_level_meta("gpt-2", **extra))
    assert tokenizer.encode("h").tokens == ["<s>", "h"]
    assert tokenizer.encode("h", add_special_tokens=False).tokens == ["h"]


def test_sentencepiece_scores_become_merges_with_byte_fallback() -> None:
    tokens = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello"]
    scores = [0.0] * 258 + [-9.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 10,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = tokenizer_from_gguf(meta)
    encoded = tokenizer.encode("hello \u00e9")
    assert encoded.tokens == ["<s>", "\u2581hello", "\u2581", "<0xC3>", "<0xA9>"]
    detok = Detokenizer(vocabulary_of(tokenizer))
    texts = [detok.feed([i])[0] for i in encoded.ids]
    assert texts == ["", "hello", " ", "", "\u00e9"]
    assert "".join(texts) == tokenizer.decode(encoded.ids)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer model 'rwkv'"),
        (byte_level_meta("deepseek-coder"), "pre-tokenizer 'deepseek-coder'"),
    ],
)
def test_an_unknown_gguf_tokenizer_is_an_error_that_names_it(
    meta: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        tokenizer_from_gguf(meta)


def test_an_unknown_decoder_is_an_error_that_names_it() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = hf_decoders.WordPiece()
    with pytest.raises(Unsupported, match="decoder WordPiece"):
        vocabulary_of(tokenizer)


@pytest.mark.parametrize("data", [b"", b"GGML", b"GGUF\x03\0\0\0", b"GGUF\x09\0\0\0" + b"\0" * 16])
def test_a_file_that_is_not_gguf_is_a_typed_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(Unsupported):
        load_text_model(str(path))


def test_a_hugging_face_directory_gives_defaults_template_and_end_tokens(tmp_path: Path) -> None:
    vocab = {char: i for i, char in enumerate(byte_to_char().values())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf_decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 7}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "repetition_penalty": 1.05,
        },
        "tokenizer_config.json": {
            "eos_token": {"content": "<end>"},
            "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        },
    }
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    model = load_text_model(str(tmp_path))
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (300, 64, (7,))
    assert model.defaults == Defaults(0.6, 0.95, top_k=20, min_p=0.0, repetition_penalty=1.05)
    assert model.chat is not None
    assert model.chat.render([{"role": "user", "content": "hi"}]) == "hi<end>"
    greedy = {"eos_token_id": [5, 6], "do_sample": False, "top_k": 9, "repetition_penalty": 1.2}
    (tmp_path / "generation_config.json").write_text(json.dumps(greedy))
    model = load_text_model(str(tmp_path))
    assert model.eos_token_ids == (5, 6)
    assert model.defaults == Defaults(repetition_penalty=1.2)
    for value in ("0", "-1", "NaN", "true", '"1.1"'):
        (tmp_path / "generation_config.json").write_text(f'{{"repetition_penalty": {value}}}')
        with pytest.raises(Unsupported, match="repetition_penalty"):
            load_text_model(str(tmp_path))


# ------------------------------------------------------------ chat templates


def test_a_template_may_refuse_messages_and_the_error_names_the_field() -> None:
    template = ChatTemplate("{{ raise_exception('no system role') }}", {})
    with pytest.raises(InvalidField, match="no system role") as caught:
        template.render([{"role": "system", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidField):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_an_error_at_load() -> None:
    with pytest.raises(Unsupported, match="chat template"):
        ChatTemplate("{% for %}", {})


# ------------------------------------------------------------ prepare

FAKE = load_text_model("", fake_vocab_size=100)
LIMITS = Limits(vocab_size=100, max_model_len=20, default_max_tokens=8, eos_token_ids=(3,))


def prepare(request: JobRequest, model: TextModel = FAKE) -> Prepared:
    return resolve(request, encode_prompt(request, model), model, LIMITS, None)


def job(**fields: Any) -> JobRequest:
    params = SamplingParams(**fields.pop("params", {}))
    if not {"prompt", "messages", "input_ids"} & set(fields):
        fields["prompt"] = "hello"
    return JobRequest(job="j", params=params, **fields)


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (job(input_ids=(1, 100)), InvalidField, "input_ids[1]"),
        (job(input_ids=()), InvalidField, "input_ids"),
        (job(params={"stop_token_ids": (100,)}), InvalidField, "stop_token_ids[0]"),
        (job(prompt="x" * 20), TooLong, "prompt"),
        (job(input_ids=(1,) * 25), TooLong, "input_ids"),
        (job(have=(1, 200)), InvalidField, "have[1]"),
    ],
)
def test_a_request_that_cannot_run_is_an_error_naming_the_field(
    request_: JobRequest, error: type[TokenbusError], field: str
) -> None:
    with pytest.raises(error) as caught:
        prepare(request_)
    assert caught.value.field == field


def test_max_tokens_is_defaulted_and_clamped_to_the_models_length() -> None:
    assert prepare(job()).max_tokens == 8
    assert prepare(job(params={"min_tokens": 10})).max_tokens == 10
    assert prepare(job(params={"max_tokens": 500})).max_tokens == 15
    assert prepare(job(prompt="x" * 19)).max_tokens == 1
    assert prepare(job(params={"max_tokens": 500, "min_tokens": 400})).min_tokens == 15


def test_end_of_sequence_ids_are_added_unless_ignored() -> None:
    assert prepare(job(params={"stop_token_ids": (9,)})).stop_token_ids == (9, 3)
    assert prepare(job(params={"ignore_eos": True})).stop_token_ids == ()


def test_sampling_takes_the_models_defaults_where_the_request_is_silent() -> None:
    model = replace(FAKE, defaults=Defaults(temperature=0.7, top_k=40))
    sampling = prepare(job(params={"top_k": 5, "seed": 11}), model).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.7, 5, 11)
    assert prepare(job(params={"temperature": 1e-8}), model).sampling.temperature == 0.0
    assert prepare(job(params={"top_k": 10**6})).sampling.top_k == 100


def test_penalties_reach_the_sampler_with_the_models_repetition_penalty_as_default() -> None:
    given = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    sampling = prepare(job(params=given)).sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.has_penalties
    assert not prepare(job()).sampling.has_penalties
    model = replace(FAKE, defaults=Defaults(repetition_penalty=1.05))
    assert prepare(job(), model).sampling.repetition_penalty == 1.05
    assert not prepare(job(params={"repetition_penalty": 1.0}), model).sampling.has_penalties


def test_a_repetition_penalty_too_small_for_float32_is_the_smallest_that_keeps_logits_finite() -> (
    None
):
    penalty = prepare(job(params={"repetition_penalty": 1e-300})).sampling.repetition_penalty
    assert np.isfinite(np.float32(100.0) / np.float32(penalty) / np.float32(1e-5))


def test_the_name_of_another_model_or_queue_is_refused() -> None:
    check_names(job(), "fake", "default")
    check_names(job(model="fake", queue="default"), "fake", "default")
    with pytest.raises(UnknownModel) as caught:
        check_names(job(model="other"), "fake", "default")
    assert caught.value.field == "model"
    with pytest.raises(UnknownQueue, match="'nightly' is not served here, 'default' is") as other:
        check_names(job(queue="nightly"), "fake", "default")
    assert other.value.field == "queue"


# ------------------------------------------------------------ the actor


class Inbox:
    """Collects what is told; `arrived` is set at each message."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.arrived = asyncio.Event()

    def tell(self, message: object) -> bool:
        self.messages.append(message)
        self.arrived.set()
        return True


def text_actor() -> TextActor:
    config = BrokerConfig("w", "default", "", "fake", "", fake_vocab_size=100)
    return TextActor(ActorSystem(asyncio.get_running_loop()), config, FAKE)


async def test_long_prompts_do_not_hold_up_short_ones() -> None:
    actor, inbox = text_actor(), Inbox()
    actor.tell(Prepare(job(prompt="x" * (INLINE_CHARS + 1)), inbox, "long"))
    actor.tell(Prepare(job(prompt="x"), inbox, "short"))
    while len(inbox.messages) < 2:
        inbox.arrived.clear()
        await asyncio.wait_for(inbox.arrived.wait(), 10)
    assert [m.context for m in inbox.messages] == ["short", "long"]
    assert all(isinstance(m, Prepared) for m in inbox.messages)
    await actor.close()


class PanicException(BaseException):
    """As pyo3 raises it for a panic in Rust code."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), ZeroDivisionError("x")])
@pytest.mark.parametrize("num_chars", [1, INLINE_CHARS + 1])
async def test_whatever_goes_wrong_in_the_tokenizer_costs_only_its_job(
    error: BaseException, num_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    actor, inbox = text_actor(), Inbox()
    monkeypatch.setattr("broker.text.actor.encode_prompt", fail)
    actor.tell(Prepare(job(prompt="x" * num_chars), inbox))
    await asyncio.wait_for(inbox.arrived.wait(), 10)
    assert inbox.messages[0].error.code == "internal"
    assert not actor.system.crashed.done()
    await actor.close()


async def test_the_engines_limits_replace_those_of_the_files() -> None:
    actor, inbox = text_actor(), Inbox()
    actor.tell(EngineUp(50, 10, 4, (2,), 1, {}))
    actor.tell(Prepare(job(prompt="x" * 10), inbox))
    actor.tell(Prepare(job(input_ids=(60,)), inbox))
    actor.tell(Prepare(job(input_ids=(6,)), inbox))
    while len(inbox.messages) < 3:
        inbox.arrived.clear()
        await asyncio.wait_for(inbox.arrived.wait(), 10)
    first, second, third = inbox.messages
    assert isinstance(first, PrepareFailed)
    assert (first.error.code, first.error.field) == ("too_long", "prompt")
    assert second.error.field == "input_ids[0]"
    assert third.stop_token_ids == (2,)
    await actor.close()
