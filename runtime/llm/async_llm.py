"""``AsyncLLM``: the same model for programs on asyncio. Requests come at any time and are computed together.

    import asyncio
    from xserv import AsyncLLM, SamplingParams

    async def main() -> None:
        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    asyncio.run(main())
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Self

from runtime.engine.errors import EngineDeadError, QueueFullError
from runtime.engine.messages import EngineOutput
from runtime.engine.option_names import known_options
from runtime.engine.sampling_params import RequestOutputKind, SamplingParams
from runtime.llm.job import Job
from runtime.llm.loaded_model import LoadedModel
from runtime.llm.outputs import EmbeddingRequestOutput, RequestOutput
from runtime.llm.prompts import Prompt


class AsyncLLM(LoadedModel):
    """The constructor blocks while the model is loaded; ``async with`` or ``shutdown`` stops the engine. Calls may come
    from several event loops."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)

    def shutdown(self) -> None:
        """Stop the engine; open requests end with "abort". May be called again."""
        self.close()

    @known_options()
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and yield its output as it grows; the last one is ``finished``.

        sampling_params  its ``output_kind`` says what each output holds: all so far (CUMULATIVE, the default), what is
                         new of one choice (DELTA), or all at the end (FINAL_ONLY); None: ``default_sampling_params()``
        request_id       for ``abort``, unique among the open requests; None: one is made
        priority         smaller is served first; None: the prompt's, else 0

        The request starts with the first step of the iteration. Closing the generator, or cancelling its task, ends
        it. Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        if priority is not None:
            prompt = {**_as_mapping(prompt), "priority": priority}
        params = sampling_params or self.default_sampling_params()
        job = await asyncio.to_thread(self._job, prompt, params, None, request_id)
        outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        await self._submit(job, outputs)
        kind = job.params.output_kind
        has_news = False
        try:
            while not job.is_finished:
                output = await outputs.get()
                delta = job.receive(output)
                if delta.should_cancel:
                    self.client.cancel(job.request_id, output.index)
                is_news = bool(delta.token_ids or delta.text or delta.finish_reason is not None)
                has_news |= is_news
                if kind is RequestOutputKind.DELTA:
                    if is_news:
                        yield job.piece(output.index, delta)
                elif job.is_finished or (has_news and kind is RequestOutputKind.CUMULATIVE and outputs.empty()):
                    yield job.copy()
                    has_news = False
        finally:
            if job.num_running:
                self.client.cancel(job.request_id)

    @known_options()
    async def embed(
        self, prompt: Prompt, *, pooling: str = "last", normalize: bool = True
    ) -> EmbeddingRequestOutput:
        """The hidden states of a prompt after the final norm as one vector: see ``LLM.embed``."""
        text, ids, images, salt = await asyncio.to_thread(self._asked_embedding, prompt)
        while True:
            try:
                future = self.client.embed(ids, pooling, images, salt)
                break
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)
        return self._embedded(text, ids, await asyncio.wrap_future(future), normalize)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their generators yield a last output with the finish reason "abort". Unknown and finished ones
        are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.client.cancel(each)

    async def check_health(self) -> None:
        """Raises ``EngineDeadError`` when the engine has died or was stopped."""
        if self.client.state != "ready":
            raise EngineDeadError("the engine is closed, or has died; see the log")

    async def _submit(self, job: Job, outputs: asyncio.Queue[EngineOutput]) -> None:
        loop = asyncio.get_running_loop()

        def hand_over(output: EngineOutput) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        while True:
            try:
                return self.client.submit(job.request, hand_over)
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)


def _as_mapping(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
