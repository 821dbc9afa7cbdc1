"""The text actor: `Prepare` in, `Prepared` or `PrepareFailed` out.

Short prompts are tokenized at once; long ones in one worker thread (the tokenizer releases the
GIL), so that a megabyte of prompt does not hold up the tokens of everybody else.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from broker.actor import Actor, ActorSystem, Overflow
from broker.config import BrokerConfig
from broker.link_messages import EngineGone, EngineProgress, EngineUp
from broker.messages import Prepare, PrepareFailed
from broker.text.model import TextModel
from broker.text.prepare import Limits, check_names, encode_prompt, prompt_size, resolve
from tokenbus.errors import Busy, Internal, TokenbusError

INLINE_CHARS = 8_192  # about 1 ms of tokenizing
RUST_PANIC = "PanicException"  # of the tokenizer's Rust code; it is no `Exception`
MAX_LONG_PROMPTS = 64  # in the thread's line; each may hold megabytes


class TextActor(Actor):
    """Mailbox policy REFUSE: a full one means that a door answers `busy`."""

    def __init__(self, system: ActorSystem, config: BrokerConfig, model: TextModel) -> None:
        super().__init__(system, "text", capacity=16_384, overflow=Overflow.REFUSE)
        self._model = model
        self._model_name = config.model_name
        self._queue = config.queue
        self._limits = Limits(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            default_max_tokens=config.limits.default_max_tokens,
            eos_token_ids=model.eos_token_ids,
        )
        self._num_long = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def handle(self, message: object) -> None:
        """See the module."""
        if isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, EngineUp):
            self._take_limits(message)
        elif not isinstance(message, EngineGone | EngineProgress):
            raise TypeError(f"text takes no {type(message).__name__}")

    async def stop(self) -> None:
        """Drop what the thread has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take_limits(self, engine: EngineUp) -> None:
        self._limits = Limits(
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            default_max_tokens=self._limits.default_max_tokens,
            eos_token_ids=self._model.eos_token_ids or engine.eos_token_ids,
        )

    def _prepare(self, message: Prepare) -> None:
        if prompt_size(message.request) <= INLINE_CHARS:
            self._answer(message, self._try_encode(message))
        elif self._num_long >= MAX_LONG_PROMPTS:
            self._answer(message, Busy("too many long prompts are being prepared", retry_ms=500))
        else:
            self._num_long += 1
            self.spawn(self._prepare_in_thread(message), "tokenize")

    async def _prepare_in_thread(self, message: Prepare) -> None:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._pool, self._try_encode, message)
        finally:
            self._num_long -= 1
        self._answer(message, result)

    def _try_encode(self, message: Prepare) -> object:
        """Prompt ids, or the TokenbusError that the job ends in."""
        try:
            check_names(message.request, self._model_name, self._queue)
            return encode_prompt(message.request, self._model)
        except TokenbusError as error:
            return error
        except BaseException as error:  # confined to this job, and told to its owner
            if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
                raise
            return Internal(f"tokenizer: {type(error).__name__}: {error}"[:400])

    def _answer(self, message: Prepare, result: object) -> None:
        request, context = message.request, message.context
        try:
            if isinstance(result, TokenbusError):
                raise result
            prepared = resolve(request, result, self._model, self._limits, context)  # type: ignore[arg-type]
        except TokenbusError as error:
            message.reply_to.tell(PrepareFailed(request, error, context))
        else:
            message.reply_to.tell(prepared)
