"""`xserv generate`: prompts in, completions out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime import collector
from runtime.commands import later
from runtime.commands.options import Adapter, LlmOptions, SamplingOptions
from runtime.text_files import read_text_file

_llm = later("runtime.llm")
_answers = later("runtime.commands.answers")
_admission = later("runtime.engine.admission")


def generate(
    llm_options: LlmOptions,
    sampling: SamplingOptions,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be repeated.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="One prompt a line, empty lines skipped; - is stdin. In a .jsonl file each line is "
            '{"prompt": TEXT} or {"prompt_token_ids": [IDS]}.'
        ),
    ] = None,
    prompt_token_ids: Annotated[
        list[str] | None, typer.Option(metavar="ID,ID,...", help="A prompt as token ids; may be repeated.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message to a chat model.")] = False,
    adapter: Adapter = None,
    n: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives beside each token (with --json).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a completion, one a line.")] = False,
) -> None:
    """Complete prompts: text on stdout, or with --json one object a line."""
    prompts: list[Any] = [*(prompt or []), *(_ids(text) for text in prompt_token_ids or [])]
    if prompt_file is not None:
        prompts.extend(read_prompts(prompt_file))
    if not prompts:
        raise typer.BadParameter("give --prompt, --prompt-file or --prompt-token-ids")

    arguments, lora_request = _answers.with_adapter(llm_options.arguments(), adapter)
    with _llm.LLM(**arguments) as llm:
        collector.resume()
        _admission.check_generates(llm.client.info)
        params = _answers.sampling_params(llm, {**sampling.given(), "n": n, "logprobs": logprobs}, max_tokens=128)
        if chat:
            prompts = [
                llm.chat_prompt([{"role": "user", "content": text}]) if isinstance(text, str) else text
                for text in prompts
            ]
        outputs = llm.generate(prompts, params, lora_request=lora_request)
        failed = [c.error for output in outputs for c in output.outputs if c.finish_reason == "error"]
        for prompt_index, output in enumerate(outputs):
            for completion in _answers.completions(output):
                if as_json:
                    print(json.dumps({"prompt_index": prompt_index, **completion}, ensure_ascii=False))
                elif llm.tokenizer is not None:
                    print(completion["text"])
                else:
                    print(" ".join(map(str, completion["token_ids"])))
    if failed:
        print(f"xserv: error: {len(failed)} completions failed: {failed[0]}", file=sys.stderr)
        raise typer.Exit(1)


def read_prompts(path: Path) -> list[str | list[int]]:
    """The prompts of a file. Raises `OSError` if it cannot be read, a usage error for a malformed line or invalid
    UTF-8."""
    name = str(path)
    text = read_text_file(path, "prompt_file")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts: list[str | list[int]] = []
    for number, line in lines:
        try:
            item = json.loads(line)
        except ValueError as error:
            raise typer.BadParameter(f"{name}:{number} is no JSON: {error}") from error
        value = item.get("prompt", item.get("prompt_token_ids")) if isinstance(item, dict) else item
        if not isinstance(value, str) and not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise typer.BadParameter(f'{name}:{number} has neither "prompt" (text) nor "prompt_token_ids" (ids)')
        prompts.append(value)
    return prompts


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"--prompt-token-ids {text!r}: not a list of integers") from None
