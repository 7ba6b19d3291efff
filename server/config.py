"""Every limit and every setting of the HTTP server, beside the engine's own (`EngineInfo`, `SamplingParams`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from runtime.errors import InvalidArgumentError
from runtime.text.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from server.pictures.addresses import Place
from server.transport.allowed_origins import is_origin

UNKNOWN_FIELDS = ("refuse", "warn")
SPECIAL_TOKENS_IN_CONTENT = ("text", "parse")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class ServerConfigError(InvalidArgumentError):
    """A setting of the server has a value that cannot be honoured."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server holds clients to, whom it lets in, and what it tells. Times in seconds, sizes in bytes.

    Connections:
    max_connections          open at once; a further one takes the place of one that keeps the server waiting, else the
                             answer is 503, but for the probes
    max_header_bytes         request line and headers together; beyond it the answer is 431
    max_headers              most header fields; beyond it the answer is 431
    header_timeout_s         from the connection, or the next request's first byte, to the end of the headers: 408
    keep_alive_timeout_s     how long a connection without a request is kept
    write_buffer_bytes       of an answer held for a client that does not read; then the answer pauses
    slow_reader_timeout_s    how long an answer may pause; then the connection is cut and the request cancelled
    max_kept_output_bytes    of one request's outputs, as they are in memory, that its client has not read: then the
                             engine pauses it until half of them are read
    ping_interval_s          a stream that is silent for so long gets a comment, so that no proxy takes it for dead

    Bodies:
    max_body_bytes           beyond it the answer is 413
    max_discarded_bytes      how much of a too large body is read and thrown away, so that a client that only listens
                             once it has sent everything gets to see the 413; beyond it the connection is closed
    body_start_timeout_s     from the headers to the body's first byte; beyond it the answer is 408
    body_timeout_s           from the headers to the body's end; beyond it the answer is 408

    Fields, beyond which the answer is 400:
    max_json_depth           nesting of arrays and objects in a body
    max_schema_depth         nesting within `response_format`, `structured_outputs` and each tool
    max_prompts              prompts, or inputs, in one request
    max_choices              choices (prompts × n) in one request
    max_messages             messages in one conversation
    max_tools                tools in one request
    max_stop_strings         stop strings
    max_logit_bias           entries of `logit_bias`

    unknown_fields           a field that nobody knows: "refuse" it, or "warn" in the log and the answer's header
    special_tokens_in_content  a special token's text in a chat's messages and tools: "text" like any other, or "parse"d
                             into the token, so that who writes a message can write turns of others

    max_stored_responses     of `/v1/responses`, kept in memory: how many, how large together, and for how long
    max_stored_response_bytes
    stored_response_ttl_s

    tool_call_parser         how tool calls are read: a notation's name, "none", or "auto": what the model's chat
                             template shows
    reasoning_parser         how reasoning is read: "think", "none", or "auto", the same

    close_schemas            objects of JSON schemas allow only the properties that they list, unless `strict` is false
    Pictures, of models that read them:
    limit_images             most pictures in one request; beyond it the answer is 400
    max_image_bytes          of a picture's file
    max_image_pixels         of a picture before it is made smaller for the model
    max_kept_image_bytes     of pictures' files, all together, that are kept under their `uuid`
    image_timeout_s          how long one picture may take to fetch, and to decode
    num_image_processes      processes that decode
    num_image_threads        requests with pictures that are prepared at once
    allow_image_urls         fetch pictures by their URL, from the public internet; else pictures come in requests
    allow_image_hosts        fetch them from these hosts alone; an address with its port may be a private one

    num_tokenizer_threads    threads that render chat templates and encode prompts, away from the event loop

    Who is let in:
    api_keys, api_key_files  keys, and files of keys (one a line, read again on SIGHUP); none: everybody
    share_prefix_cache       let holders of different keys share cached prefixes, whose timing tells who said what
    allowed_origins          other sites whose pages may ask ("https://chat.example", "*": all)
    allowed_hosts            names in the Host header; None: any. `serve` sets it where it listens on loopback alone
    ssl_certfile, ssl_keyfile  TLS; both or neither

    Operations:
    drain_timeout_s          how long open requests may go on after SIGTERM
    log_format               "text" or "json", one object a line
    log_level                least level that is logged
    log_file                 instead of stderr
    log_prompts              write prompts to the log
    otlp_endpoint            where OpenTelemetry traces go (needs the extra `otel`); None: nowhere
    """

    max_connections: int = 3000
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 30.0
    write_buffer_bytes: int = 64 * 1024
    slow_reader_timeout_s: float = 30.0
    max_kept_output_bytes: int = 16 * 1024 * 1024
    ping_interval_s: float = 15.0

    max_body_bytes: int = 8 * 1024 * 1024
    max_discarded_bytes: int = 256 * 1024 * 1024
    body_start_timeout_s: float = 20.0
    body_timeout_s: float = 60.0

    max_json_depth: int = 64
    max_schema_depth: int = 32
    max_prompts: int = 256
    max_choices: int = 1024
    max_messages: int = 4096
    max_tools: int = 128
    max_stop_strings: int = 64
    max_logit_bias: int = 4096

    unknown_fields: str = "refuse"
    special_tokens_in_content: str = "text"

    max_stored_responses: int = 1024
    max_stored_response_bytes: int = 64 * 1024 * 1024
    stored_response_ttl_s: float = 3600.0

    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    close_schemas: bool = True

    limit_images: int = 16
    max_image_bytes: int = 20 * 1024 * 1024
    max_image_pixels: int = 32 * 1024 * 1024
    max_kept_image_bytes: int = 128 * 1024 * 1024
    image_timeout_s: float = 10.0
    num_image_processes: int = 2
    num_image_threads: int = 8
    allow_image_urls: bool = False
    allow_image_hosts: tuple[str, ...] = ()

    num_tokenizer_threads: int = 2

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_files: tuple[str, ...] = ()
    share_prefix_cache: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    drain_timeout_s: float = 10.0
    log_format: str = "text"
    log_level: str = "info"
    log_file: str | None = None
    log_prompts: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Raises `ServerConfigError`, which names the field, its value and its limit."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and not (isinstance(value, int) and value >= 1):
                raise ServerConfigError(f"{each.name} must be at least 1, got {value!r}")
            if each.type == "float" and not (0 < value < 1e6 or (value == 0 and each.name == "drain_timeout_s")):
                raise ServerConfigError(f"{each.name} must be above 0 and below 1,000,000 seconds, got {value!r}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ServerConfigError("ssl_certfile and ssl_keyfile belong together: give both, or neither")
        for name, choices in (
            ("unknown_fields", UNKNOWN_FIELDS),
            ("special_tokens_in_content", SPECIAL_TOKENS_IN_CONTENT),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ServerConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.log_format not in LOG_FORMATS:
            raise ServerConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")
        if self.log_level not in LOG_LEVELS:
            raise ServerConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise ServerConfigError(
                f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, got {self.tool_call_parser!r}"
            )
        if self.reasoning_parser not in REASONING_PARSERS:
            raise ServerConfigError(
                f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, got {self.reasoning_parser!r}"
            )
        if self.allow_image_hosts and not self.allow_image_urls:
            raise ServerConfigError("allow_image_hosts says which hosts allow_image_urls is for: give both")
        for host in self.allow_image_hosts:
            try:
                Place.of(host)
            except ValueError:
                example = "images.example or 10.0.0.3:8080"
                raise ServerConfigError(f"allow_image_hosts: {host!r} is no host, such as {example}") from None
        for origin in self.allowed_origins:
            if not is_origin(origin):
                examples = "https://chat.example, http://localhost:*, app://*, tauri://localhost, null or *"
                what = f"an origin without a path, such as {examples}"
                raise ServerConfigError(f"--allowed-origin is {origin!r}, must be {what}")
