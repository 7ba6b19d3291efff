"""Fields of other servers that are not OpenAI's: those of vLLM, llama.cpp, Ollama, SGLang, LM Studio, OpenRouter and
others, which clients send to any server.

Fields that exist here under another name are renamed (`SAME_AS`, `rewrite`). The others, in `EXTENSIONS` for a
request's fields and `WITHIN` for those of its parts, are accepted without effect, and the answer's header
`X-Xserv-Ignored` names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.errors import ApiError, invalid, json_text

SAME_AS: dict[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "typ_p": "typical_p",
    "nsigma": "top_n_sigma",
    "dry_range": "dry_penalty_last_n",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "rid": "request_id",
    "extra_key": "cache_salt",
    "n_cmpl": "n",
    "return_tokens": "return_token_ids",
    "regex": "structured_outputs.regex",
    "json_schema": "structured_outputs.json",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "thinking_budget_tokens": "thinking_budget",
    "thinking_token_budget": "thinking_budget",
    "reasoning_budget": "thinking_budget",
    "reasoning_budget_tokens": "thinking_budget",
}
"""Other names of fields, or of fields of objects, that there are."""

FILL_CONTEXT = -2
"""llama.cpp's and Ollama's limit of an answer that goes on to the context's end, which is no other than -1 here."""

_NOT_BUILT = "infill", "adaptive_p"
"""Samplers of llama.cpp's `samplers`."""

_AT_START = "decided when the server starts"
_SAMPLER = "a sampler that is not built"
_SHAPE = "the answer has one shape"
_ROUTING = "there is one model, and its engines are routed to by load and prefixes"
_BUDGET = "a text has no reasoning"
_CACHE = "prefixes are cached without being asked for"
_SEARCH = "there is no search"

_REASONS: dict[str, str] = {
    _AT_START: "num_ctx num_batch num_ubatch num_gpu main_gpu low_vram f16_kv vocab_only use_mmap use_mlock num_thread "
    "numa logits_all embedding_only keep_alive ttl id_slot slot_id draft_model draft_num_predict lora lora_path "
    "adapter_id options speculative.n_max speculative.n_min speculative.p_min speculative.type",
    _SAMPLER: "tfs_z top_a repeat_last_n penalize_nl penalize_newline min_keep adaptive_target adaptive_decay "
    "smoothing_factor repetition_detection backend_sampling do_sample watermark",
    _SHAPE: "timings_per_token return_progress post_sampling_probs response_fields n_probs separate_reasoning "
    "stream_reasoning reasoning_format reasoning_in_content parse_tool_calls incremental_output result_format details "
    "decoder_input_details return_hidden_states return_routed_experts return_cached_tokens_details return_meta_info "
    "usage return_full_text",
    _ROUTING: "models route provider plugins transforms preset session_id session_params trace fallbacks "
    "data_parallel_rank routed_dp_rank disagg_prefill_dp_rank bootstrap_host bootstrap_port bootstrap_room",
    _BUDGET: "thinking_budget thinking_budget_tokens thinking_token_budget reasoning_budget reasoning_budget_tokens",
    _CACHE: "cache_prompt cache_control n_cache_reuse",
    _SEARCH: "enable_search search_options search_parameters",
    "the context is never shifted": "n_keep n_discard num_keep context_shift",
    "llguidance writes every grammar, compactly": "guided_decoding_backend guided_whitespace_pattern",
    "the model reads text only": "media_io_kwargs",
    "there is no time limit but the client's": "t_max_predict_ms t_max_prompt_ms",
    "lines are not indented": "n_indent",
    "stop strings are cut unless include_stop_str_in_output is true": "no_stop_trim",
    "a prompt of the provider's own": "safe_prompt prompt_mode",
    "a parameter of the provider's logic": "custom_params",
    "the input is taken as it is": "input_type",
    "the model's own switch; send chat_template_kwargs": "thinking think reasoning",
}

EXTENSIONS: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Fields of a request that are taken without effect, with the reason. `thinking`, `think` and `reasoning` are where
the request is no chat."""

_WITHIN = {
    "Message": "id object type created created_at createdAt timestamp date status metadata cache_control thinking "
    "thinking_blocks thinking_signature provider_specific_fields reasoning_details reasoning_signature "
    "reasoning_item_id parsed prefix partial parts weight tool_name finish_reason stop_reason token_ids logprobs "
    "citations phase model",
    "ContentPart": "cache_control id index citations annotations logprobs providerOptions prompt_cache_breakpoint",
    "ToolCall": "extra_content provider_specific_fields caller cache_control status thought_signature",
    "FunctionCall": "parsed_arguments thought_signature provider_specific_fields",
    "Tool": "cache_control strict id defer_loading eager_input_streaming input_examples allowed_callers",
    "FunctionDefinition": "cache_control id title returns response defer_loading input_examples output_schema",
    "FunctionTool": "cache_control id defer_loading input_examples allowed_callers output_schema",
    "StructuredOutputs": "disable_any_whitespace disable_additional_properties whitespace_pattern disable_fallback",
    "InputMessage": "parsed cache_control created_at created_by name metadata",
    "InputPart": "parsed cache_control id citations",
    "InputFunctionCall": "parsed_arguments caller created_by agent thought_signature",
    "CustomTool": "defer_loading allowed_callers cache_control",
    "InputCustomToolCall": "caller created_by agent thought_signature",
    "InputFunctionCallOutput": "created_by name namespace caller agent cache_control",
    "InputReasoning": "created_by agent signature format",
    "Turn": "id type model stop_reason stop_sequence stop_details usage container",
    "TextInput": "index parsed_output",
    "ToolUseInput": "index partial_json",
    "ThinkingInput": "index cache_control",
    "MessageTool": "defer_loading input_examples",
    "OllamaMessage": "id created_at model done timestamp",
}

WITHIN: dict[str, frozenset[str]] = {kind: frozenset(names.split()) for kind, names in _WITHIN.items()}
"""The same for objects within a request, by the names of their types: what another server or a client notes beside a
message, and hints of other APIs about tools."""


def rewrite(request: dict[str, Any], fields: Iterable[str], ignored: list[str], sent: dict[str, str]) -> dict[str, Any]:
    """The request with other servers' fields under this server's names, if the schema's `fields` have them. `sent` maps
    these names to the sent ones, `ignored` gets the names of fields without effect. Raises `ApiError` 400 if both names
    are sent and contradict each other."""
    known = frozenset(fields)
    result = dict(request)
    for name, meaning in SAME_AS.items():
        if name in result and name not in known and meaning.partition(".")[0] in known:
            value = result.pop(name)
            if value == FILL_CONTEXT and name in ("n_predict", "num_predict"):
                value = -1
            if value is not None:
                _put(result, name, meaning, value, sent)
    _rewrite_samplers(result, ignored)
    if "reasoning_effort" in known:
        _rewrite_thinking(result, ignored, sent)
    if "tool_choice" in known and "system" not in known:  # Anthropic's own requests have other names
        _rewrite_tool_choice(result, sent, is_chat="messages" in known)
    if "continue_final_message" in known:
        _rewrite_prefix(result)
    return result


def _rewrite_samplers(request: dict[str, Any], ignored: list[str]) -> None:
    """llama.cpp's names of samplers that are not built have no effect: editors' plug-ins send "infill"."""
    names = request.get("samplers")
    if isinstance(names, list):
        left_out = [name for name in names if isinstance(name, str) and name.lower().replace("-", "_") in _NOT_BUILT]
        request["samplers"] = [name for name in names if name not in left_out]
        ignored += [f"samplers.{name}" for name in dict.fromkeys(left_out)]


def _rewrite_thinking(request: dict[str, Any], ignored: list[str], sent: dict[str, str]) -> None:
    """`think`, Ollama's; `reasoning`, OpenRouter's; `thinking`, Anthropic's and others'."""
    think = request.pop("think", None)
    if isinstance(think, bool):
        _put(request, "think", "chat_template_kwargs.enable_thinking", think, sent)
    elif think is not None:
        _put(request, "think", "reasoning_effort", think, sent)
    thinking = request.pop("thinking", None)
    if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "disabled", "adaptive", "auto"):
        is_enabled = thinking["type"] != "disabled"
        _put(request, "thinking", "chat_template_kwargs.enable_thinking", is_enabled, sent)
        if thinking.get("budget_tokens") is not None:
            _put(request, "thinking.budget_tokens", "thinking_budget", thinking["budget_tokens"], sent)
        ignored += _others("thinking", thinking, "type", "budget_tokens")
    elif isinstance(thinking, bool):
        _put(request, "thinking", "chat_template_kwargs.enable_thinking", thinking, sent)
    elif thinking is not None:
        given = thinking.get("type") if isinstance(thinking, dict) else thinking
        what = 'true, false or an object with the type "enabled", "disabled", "adaptive" or "auto"'
        raise invalid("thinking", f"thinking must be {what}, got {json_text(given)}.", "invalid_type")
    reasoning = request.pop("reasoning", None)
    if isinstance(reasoning, dict):
        if reasoning.get("effort") is not None:
            _put(request, "reasoning.effort", "reasoning_effort", reasoning["effort"], sent)
        enabled = reasoning.get("enabled")
        if isinstance(enabled, bool):
            _put(request, "reasoning.enabled", "chat_template_kwargs.enable_thinking", enabled, sent)
        elif enabled is not None:
            name = "reasoning.enabled"
            raise invalid(name, f"{name} must be true or false, got {json_text(enabled)}.", "invalid_type")
        if reasoning.get("max_tokens") is not None:
            _put(request, "reasoning.max_tokens", "thinking_budget", reasoning["max_tokens"], sent)
        ignored += _others("reasoning", reasoning, "effort", "enabled", "max_tokens")
    elif reasoning is not None:
        what = 'an object with "effort" or "enabled"'
        raise invalid("reasoning", f"reasoning must be {what}, got {json_text(reasoning)}.", "invalid_type")


def _rewrite_tool_choice(request: dict[str, Any], sent: dict[str, str], *, is_chat: bool) -> None:
    """Mistral's "any", Anthropic's objects, and a named function in the form of OpenAI's other API."""
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.keys() == {"type"} and choice["type"] in ("auto", "none", "required", "any"):
        choice = choice["type"]
    elif isinstance(choice, dict) and choice.get("type") in ("function", "tool"):
        own, other = ("function.name", "name") if is_chat else ("name", "function.name")
        inner = choice.get("function")
        name = choice.get("name") if inner is None else inner.get("name") if isinstance(inner, dict) else None
        is_plain = choice.keys() <= {"type", "name", "function"} and None in (inner, choice.get("name"))
        if is_plain and isinstance(name, str):
            if (inner is None) == is_chat:
                sent[f"tool_choice.{own}"] = f"tool_choice.{other}"
            choice = {"type": "function"} | ({"function": {"name": name}} if is_chat else {"name": name})
    if choice is not None:
        request["tool_choice"] = "required" if choice == "any" else choice


def _others(name: str, fields: dict[str, Any], *read: str) -> list[str]:
    """The names of an object's fields that are not read."""
    return [f"{name}.{each}" for each, value in fields.items() if each not in read and value is not None]


def _rewrite_prefix(request: dict[str, Any]) -> None:
    """`prefix` and `partial` of the last message, DeepSeek's, Mistral's and Moonshot's: it is continued."""
    messages = request.get("messages")
    if not (isinstance(messages, list) and messages):
        return
    last = messages[-1]
    if not (isinstance(last, dict) and last.get("role") == "assistant"):
        return
    if last.get("prefix") is True or last.get("partial") is True:
        request["messages"] = [*messages[:-1], {k: v for k, v in last.items() if k not in ("prefix", "partial")}]
        request.setdefault("continue_final_message", True)
        request.setdefault("add_generation_prompt", False)


def _put(request: dict[str, Any], name: str, meaning: str, value: Any, sent: dict[str, str]) -> None:
    """Sets the field that the sent one stands for."""
    outer, _, inner = meaning.partition(".")
    if not inner:
        if request.get(outer) is not None and request[outer] != value:
            raise _contradiction(name, sent.get(meaning, meaning))
        request[outer] = value
        sent[meaning] = name
        return
    there = request.get(outer)
    if there is None:
        there = {}
    if not isinstance(there, dict):
        return  # the schema refuses it
    if there.get(inner) is not None and there[inner] != value:
        raise _contradiction(name, sent.get(meaning, meaning))
    request[outer] = {**there, inner: value}
    sent[meaning] = name


def _contradiction(name: str, meaning: str) -> ApiError:
    return invalid(name, f"{name} and {meaning} contradict each other; send one.")
