"""The flags of the HTTP server: one for every field of `ServerConfig`, under its name, with its default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import typer

from runtime.text.parser_names import TOOL_CALL_PARSERS
from server.config import ServerConfig

API_KEY_VARIABLE = "XSERV_API_KEY"
"""The environment variable that holds API keys, with spaces between them."""

_CONFIG = ServerConfig()


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits, keys and operations of the server; the meanings are `ServerConfig`'s."""

    HEADINGS: ClassVar = {
        "max_connections": "Limits of the server",
        "tool_call_parser": "Answers",
        "num_tokenizer_threads": "Limits of the server",
        "api_keys": "Keys and addresses",
        "drain_timeout_s": "Operations",
    }

    max_connections: Annotated[
        int, typer.Option(help="Connections open at once; beyond it the answer is 503.", min=1)
    ] = _CONFIG.max_connections
    max_header_bytes: Annotated[
        int, typer.Option(help="Largest request line and headers; beyond it the answer is 431.", min=1)
    ] = _CONFIG.max_header_bytes
    max_headers: Annotated[int, typer.Option(help="Most header fields; beyond it the answer is 431.", min=1)] = (
        _CONFIG.max_headers
    )
    header_timeout_s: Annotated[float, typer.Option(help="Seconds that headers may take to arrive.")] = (
        _CONFIG.header_timeout_s
    )
    keep_alive_timeout_s: Annotated[float, typer.Option(help="Seconds that an idle connection is kept.")] = (
        _CONFIG.keep_alive_timeout_s
    )
    write_buffer_bytes: Annotated[
        int, typer.Option(help="Bytes of an answer held for a client that does not read; then it pauses.", min=1)
    ] = _CONFIG.write_buffer_bytes
    slow_reader_timeout_s: Annotated[
        float, typer.Option(help="Seconds that an answer may pause; then its connection is cut.")
    ] = _CONFIG.slow_reader_timeout_s
    max_kept_output_bytes: Annotated[
        int, typer.Option(help="Bytes of a request's outputs that its client has not read; then it pauses.", min=1)
    ] = _CONFIG.max_kept_output_bytes
    ping_interval_s: Annotated[float, typer.Option(help="Seconds until a silent stream gets a comment.")] = (
        _CONFIG.ping_interval_s
    )
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body; beyond it the answer is 413.", min=1)] = (
        _CONFIG.max_body_bytes
    )
    max_discarded_bytes: Annotated[
        int, typer.Option(help="Bytes of a too large body that are read before the connection is closed.", min=1)
    ] = _CONFIG.max_discarded_bytes
    body_start_timeout_s: Annotated[float, typer.Option(help="Seconds until a body's first byte.")] = (
        _CONFIG.body_start_timeout_s
    )
    body_timeout_s: Annotated[float, typer.Option(help="Seconds that a body may take to arrive.")] = (
        _CONFIG.body_timeout_s
    )
    max_json_depth: Annotated[int, typer.Option(help="Deepest nesting in a body.", min=1)] = _CONFIG.max_json_depth
    max_schema_depth: Annotated[int, typer.Option(help="Deepest nesting in a JSON schema or a tool.", min=1)] = (
        _CONFIG.max_schema_depth
    )
    max_prompts: Annotated[int, typer.Option(help="Most prompts or inputs in one request.", min=1)] = (
        _CONFIG.max_prompts
    )
    max_choices: Annotated[int, typer.Option(help="Most choices (prompts × n) in one request.", min=1)] = (
        _CONFIG.max_choices
    )
    max_messages: Annotated[int, typer.Option(help="Most messages in a conversation.", min=1)] = _CONFIG.max_messages
    max_tools: Annotated[int, typer.Option(help="Most tools in one request.", min=1)] = _CONFIG.max_tools
    max_stop_strings: Annotated[int, typer.Option(help="Most stop strings.", min=1)] = _CONFIG.max_stop_strings
    max_logit_bias: Annotated[int, typer.Option(help="Most entries of logit_bias.", min=1)] = _CONFIG.max_logit_bias
    unknown_fields: Annotated[
        Literal["refuse", "warn"],
        typer.Option(help="A request's field that nobody knows: 400, or only a warning and X-Xserv-Ignored."),
    ] = "refuse"
    special_tokens_in_content: Annotated[
        Literal["text", "parse"],
        typer.Option(help="A special token's text in a chat's messages: text, or the token (turns can be forged)."),
    ] = "text"
    max_stored_responses: Annotated[int, typer.Option(help="Most answers of /v1/responses that are kept.", min=1)] = (
        _CONFIG.max_stored_responses
    )
    max_stored_response_bytes: Annotated[int, typer.Option(help="Bytes of the answers that are kept.", min=1)] = (
        _CONFIG.max_stored_response_bytes
    )
    stored_response_ttl_s: Annotated[float, typer.Option(help="Seconds that an answer is kept.")] = (
        _CONFIG.stored_response_ttl_s
    )
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"How tool calls are read in answers: {', '.join(TOOL_CALL_PARSERS)}. auto: as the template shows.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        typer.Option(help="How reasoning is read in answers; auto: as the chat template shows."),
    ] = "auto"
    close_schemas: Annotated[
        bool, typer.Option(help="Objects of schemas allow only the properties that they list, unless strict is false.")
    ] = _CONFIG.close_schemas
    limit_images: Annotated[int, typer.Option(help="Most pictures in one request.", min=1)] = _CONFIG.limit_images
    max_image_bytes: Annotated[int, typer.Option(help="Largest file of a picture.", min=1)] = _CONFIG.max_image_bytes
    max_image_pixels: Annotated[
        int, typer.Option(help="Most pixels of a picture, before it is made smaller for the model.", min=1)
    ] = _CONFIG.max_image_pixels
    max_kept_image_bytes: Annotated[
        int, typer.Option(help="Memory for pictures that requests name by their uuid alone.", min=1)
    ] = _CONFIG.max_kept_image_bytes
    image_timeout_s: Annotated[
        float, typer.Option(help="Seconds that one picture may take to fetch, and to decode.")
    ] = _CONFIG.image_timeout_s
    num_image_processes: Annotated[int, typer.Option(help="Processes that decode pictures.", min=1)] = (
        _CONFIG.num_image_processes
    )
    num_image_threads: Annotated[
        int, typer.Option(help="Requests with pictures that are prepared at once.", min=1)
    ] = _CONFIG.num_image_threads
    allow_image_urls: Annotated[
        bool, typer.Option(help="Fetch pictures by their URL, from the public internet.")
    ] = _CONFIG.allow_image_urls
    allow_image_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-image-host",
            metavar="HOST",
            show_default=False,
            help="Fetch pictures from this host alone, or HOST:PORT; may be repeated. An address with its port may be "
            "a private one.",
        ),
    ] = None
    num_tokenizer_threads: Annotated[
        int, typer.Option(help="Threads that render templates and encode large prompts.", min=1)
    ] = _CONFIG.num_tokenizer_threads
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar=API_KEY_VARIABLE,
            show_default=False,
            help="Key that clients must send; may be repeated. Others can see it in the list of processes: rather use "
            "--api-key-file.",
        ),
    ] = None
    api_key_files: Annotated[
        list[str] | None,
        typer.Option("--api-key-file", metavar="PATH", help="File of keys, one a line; read again on SIGHUP."),
    ] = None
    share_prefix_cache: Annotated[
        bool, typer.Option("--share-prefix-cache", help="Let holders of different keys share cached prefixes.")
    ] = _CONFIG.share_prefix_cache
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origin", metavar="ORIGIN", help="Site whose pages may ask (*: all); may be repeated."),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="Name in the Host header (*: any); may be repeated."),
    ] = None
    ssl_certfile: Annotated[str | None, typer.Option(metavar="PATH", help="Certificate, for TLS.")] = None
    ssl_keyfile: Annotated[str | None, typer.Option(metavar="PATH", help="The certificate's key.")] = None
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            "--drain-timeout-s", "--drain-timeout", help="Seconds that open requests have after SIGTERM.", min=0.0
        ),
    ] = _CONFIG.drain_timeout_s
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Lines of text, or of JSON.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], typer.Option(help="Least level that is logged.")
    ] = "info"
    log_file: Annotated[str | None, typer.Option(metavar="PATH", help="Where the log goes instead of stderr.")] = None
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = _CONFIG.log_prompts
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Where OpenTelemetry traces go (needs the extra otel).")
    ] = None

    def config(self) -> ServerConfig:
        """Raises `ServerConfigError`."""
        values: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, list):
                value = tuple(value)
            if value is not None and value != ():
                values[each.name] = value
        return ServerConfig(**values)
