"""Every limit and every setting of the HTTP server, beside the engine's own (`EngineInfo`, `SamplingParams`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from runtime.engine.config import bytes_of_gib, gib_of_bytes
from runtime.engine.option import Flag, Option, check_options, describe, option_fields
from runtime.errors import InvalidArgumentError
from runtime.text.parser_names import TOOL_CALL_PARSERS, ReasoningParser

LIMITS, ANSWERS, MODELS, KEYS, OPERATIONS = HEADINGS = (
    "Limits of the server", "Answers", "Several models", "Keys and addresses", "Operations",
)  # fmt: skip
"""The headings of the server's flags in the help, in this order."""


class ServerConfigError(InvalidArgumentError):
    """A setting of the server has a value that cannot be honoured."""


ANY_PORT = ":*"
"""The end of an origin that stands for those of every port."""

_PEER = re.compile(r"[^\s/@]+:[0-9]{1,5}")
_WEB_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#@*:\[\]]+)(:([0-9]{1,5}|\*))?/?")
_APP_ORIGIN = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://(\*|[^\s/?#@*]*)/?")


def is_origin(text: str) -> bool:
    """Whether `origins_pattern` accepts it: "*", "null", a site, or all pages of an application's scheme ("app://")."""
    lowered = text.lower()
    return lowered in ("*", "null") or any(kind.fullmatch(lowered) for kind in (_WEB_ORIGIN, _APP_ORIGIN))


def origins_pattern(origins: Sequence[str]) -> str:
    """A regular expression that matches whole origins; it matches none if there are none."""
    patterns = []
    for origin in origins:
        lowered = origin.lower()
        scheme, _, rest = lowered.partition("://")
        lowered = lowered if rest in ("", "*") else lowered.rstrip("/")
        if lowered == "*":
            patterns.append(".*")
        elif rest in ("", "*", "/") and scheme != lowered:
            patterns.append(re.escape(f"{scheme}://") + ".*")
        elif lowered.endswith(ANY_PORT):
            patterns.append(re.escape(lowered.removesuffix(ANY_PORT)) + "(:[0-9]{1,5})?")
        else:
            patterns.append(re.escape(lowered))
    return "|".join(patterns) or "(?!)"


@dataclass(frozen=True, slots=True)
class Place:
    """A host that pictures may come from. `port`: only this one, or None for those of http and https."""

    host: str
    port: int | None

    @classmethod
    def of(cls, text: str) -> "Place":
        """ "images.example", "images.example:8080", "10.0.0.3:8080", "[fd00::3]:8080". Raises ValueError."""
        parts = urlsplit(f"//{text}")
        if not parts.hostname or parts.netloc != text or "@" in text or parts.port == 0:
            raise ValueError(f"{text!r} is no host")
        return cls(parts.hostname, parts.port)


def _count(help: str, about: str = "") -> Option:
    return Option(help=help, about=about, heading=LIMITS, must_be="at least 1", flag=Flag(least=1))


def _seconds(help: str, about: str = "") -> Option:
    must_be = "above 0 and below 1,000,000 seconds"
    return Option(help=help, about=about, heading=LIMITS, below=1e6, must_be=must_be)


def _repeated(
    declaration: str, help: str, about: str = "", *, heading: str = KEYS, metavar: str | None = None,
    variable: str | None = None,
) -> Option:  # fmt: skip
    """Texts, of which a flag has one each; none: there is no flag."""
    flag = Flag(
        declarations=(declaration,), kind=list[str], metavar=metavar, variable=variable, read=tuple,
        write=lambda texts: texts or None,
    )  # fmt: skip
    return Option(help=help, about=about, heading=heading, flag=flag)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server's limits for clients, its keys and origins, and its reports. Times in seconds, sizes in bytes. Raises
    `ServerConfigError`, which names the field, its value and its limit."""

    max_connections: Annotated[
        int,
        _count(
            "Connections open at once; beyond it the answer is 503.",
            "open at once; a further one takes the place of one that keeps the server waiting, else the answer is 503, "
            "but for the probes",
        ),
    ] = 3000
    max_header_bytes: Annotated[int, _count("Largest request line and headers; beyond it the answer is 431.")] = (
        16 * 1024
    )
    max_headers: Annotated[int, _count("Most header fields; beyond it the answer is 431.")] = 100
    header_timeout_s: Annotated[
        float,
        _seconds(
            "Seconds that headers may take to arrive.",
            "from the connection, or the next request's first byte, to the end of the headers: 408",
        ),
    ] = 10.0
    keep_alive_timeout_s: Annotated[float, _seconds("Seconds that an idle connection is kept.")] = 30.0
    write_buffer_bytes: Annotated[
        int, _count("Bytes of an answer held for a client that does not read; then it pauses.")
    ] = 64 * 1024
    slow_reader_timeout_s: Annotated[
        float,
        _seconds(
            "Seconds that an answer may pause; then its connection is cut.",
            "how long an answer may pause; then the connection is cut and the request cancelled",
        ),
    ] = 30.0
    max_kept_output_bytes: Annotated[
        int,
        _count(
            "Bytes of a request's outputs that its client has not read; then it pauses.",
            "of one request's outputs, as they are in memory, that its client has not read: then the engine pauses it "
            "until half of them are read",
        ),
    ] = 16 * 1024 * 1024
    ping_interval_s: Annotated[
        float,
        _seconds(
            "Seconds until a silent stream gets a comment.",
            "a stream that is silent for so long gets a comment, so that no proxy takes it for dead",
        ),
    ] = 15.0

    max_body_bytes: Annotated[int, _count("Largest request body; beyond it the answer is 413.")] = 8 * 1024 * 1024
    max_discarded_bytes: Annotated[
        int,
        _count(
            "Bytes of a refused body that are read before the connection is closed.",
            "how much of a refused body is read and thrown away, so that a client that only listens once it has sent "
            "everything gets to see the answer; beyond it the connection is closed",
        ),
    ] = 256 * 1024 * 1024
    body_start_timeout_s: Annotated[
        float,
        _seconds(
            "Seconds until a body's first byte.",
            "from the headers to the body's first byte; beyond it the answer is 408",
        ),
    ] = 20.0
    body_timeout_s: Annotated[
        float,
        _seconds(
            "Seconds that a body may take to arrive.", "from the headers to the body's end; beyond it the answer is 408"
        ),
    ] = 60.0

    max_json_depth: Annotated[
        int, _count("Deepest nesting in a body.", "nesting of arrays and objects; beyond it the answer is 400")
    ] = 64
    max_schema_depth: Annotated[
        int,
        _count(
            "Deepest nesting in a JSON schema or a tool.",
            "nesting within `response_format`, `structured_outputs` and each tool; beyond it the answer is 400",
        ),
    ] = 32
    max_prompts: Annotated[int, _count("Most prompts or inputs in one request.")] = 256
    max_inputs: Annotated[int, _count("Most texts to embed, classify or rank in one request.")] = 2048
    max_choices: Annotated[int, _count("Most choices (prompts × n) in one request.")] = 1024
    max_messages: Annotated[int, _count("Most messages in a conversation.")] = 4096
    max_tools: Annotated[int, _count("Most tools in one request.")] = 128
    max_stop_strings: Annotated[int, _count("Most stop strings.")] = 64
    max_logit_bias: Annotated[int, _count("Most entries of logit_bias.")] = 4096

    unknown_fields: Annotated[
        Literal["refuse", "warn"],
        Option(
            help="An unknown field of a request: 400, or only a warning and X-Xserv-Ignored.",
            about='an unknown field: "refuse" it, or "warn" in the log and the answer\'s header',
            heading=LIMITS,
        ),
    ] = "refuse"
    special_tokens_in_content: Annotated[
        Literal["text", "parse"],
        Option(
            help="A special token's text in a chat's messages: text, or the token (turns can be forged).",
            about=(
                'a special token\'s text in a chat\'s messages and tools: "text" like any other, or "parse"d into the '
                "token, so that who writes a message can write turns of others"
            ),
            heading=LIMITS,
        ),
    ] = "text"

    max_stored_responses: Annotated[int, _count("Most answers of /v1/responses that are kept.")] = 1024
    max_stored_response_bytes: Annotated[int, _count("Bytes of the answers that are kept.")] = 64 * 1024 * 1024
    stored_response_ttl_s: Annotated[float, _seconds("Seconds that an answer is kept.")] = 3600.0
    responses_dir: Annotated[
        str,
        Option(
            help="Folder in which answers of /v1/responses outlive the server, but those with store: false.",
            about="folder in which they outlive the server, readable by its owner alone; several servers may share it",
            heading=LIMITS,
            flag=Flag(metavar="DIR"),
        ),
    ] = ""
    responses_dir_bytes: Annotated[int, _count("Bytes of the answers in --responses-dir.")] = 1 << 30
    responses_dir_ttl_s: Annotated[
        float,
        Option(
            help="Seconds that an answer is kept in --responses-dir.", heading=LIMITS, below=1e9,
            must_be="above 0 and below 1,000,000,000 seconds",
        ),
    ] = 30 * 86400.0  # fmt: skip

    tool_call_parser: Annotated[
        str,
        Option(
            help=f"How tool calls are read in answers: {', '.join(TOOL_CALL_PARSERS)}. auto: as the template shows.",
            about=(
                'how tool calls are read: a notation\'s name, "none", or "auto": what the model\'s chat template shows'
            ),
            heading=ANSWERS,
            choices=TOOL_CALL_PARSERS,
            flag=Flag(metavar="NAME"),
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Option(
            help="How reasoning is read in answers; auto: as the chat template shows.",
            about='how reasoning is read: "think", "none", or "auto": what the model\'s chat template shows',
            heading=ANSWERS,
        ),
    ] = "auto"
    close_schemas: Annotated[
        bool,
        Option(
            help="Objects of schemas allow only the properties that they list, unless strict is false.", heading=ANSWERS
        ),
    ] = True

    reasoning_budget_message: Annotated[
        str | None,
        Option(
            help="Words of a model whose budget of reasoning is spent; default: its maker's.",
            heading=ANSWERS,
            flag=Flag(metavar="TEXT"),
        ),
    ] = None
    remembered_call_bytes: Annotated[
        int,
        Option(
            help="Memory for the text of tool calls, to render them as they were written; 0: none.",
            about=(
                "of the text of answers' tool calls: a call that a client sends back with the same arguments is "
                "rendered as the model wrote it; 0, or an engine with `exact`: as the template writes it"
            ),
            heading=ANSWERS,
            least=0,
        ),
    ] = 16 * 1024 * 1024
    keep_client_noise: Annotated[
        bool,
        Option(
            help="Render lines that clients write for their own servers, though each request has others.",
            about=(
                "render lines that clients write into prompts for their own servers (`CLIENT_NOISE`), though they "
                "differ in each request, so that no prefix is found again"
            ),
            heading=ANSWERS,
        ),
    ] = False

    lora_modules: Annotated[
        tuple[str, ...],
        _repeated(
            "--lora-modules",
            "Adapter to serve, as NAME=FOLDER; may be repeated.",
            "adapters to serve, each `name=folder`, or vLLM's JSON object with `name` and `path`",
            heading=ANSWERS,
            metavar="NAME=FOLDER",
        ),
    ] = ()
    lora_root: Annotated[
        str | None,
        Option(
            help="Folder of adapters that clients may load by /v1/load_lora_adapter; without it they load none.",
            about="the folder of adapters that clients may load by `/v1/load_lora_adapter`; None: they load none",
            heading=ANSWERS,
            flag=Flag(metavar="DIR"),
        ),
    ] = None

    models_config: Annotated[
        str,
        Option(
            help="Models to serve, by name: a TOML or JSON file of tables [models.NAME].",
            about='file of models to serve, by name (`server.hosting.settings`); "": none',
            heading=MODELS,
            flag=Flag(metavar="FILE"),
        ),
    ] = ""
    models_memory_bytes: Annotated[
        int | None,
        Option(
            help="GiB that loaded models may take of each device; default: 0.9 of a GPU, or of the host's free memory.",
            about="bytes that loaded models may take of each device; None: 0.9 of a GPU, or of the host's free memory",
            heading=MODELS,
            flag=Flag(name="models_memory", kind=float, least=0.0, read=bytes_of_gib, write=gib_of_bytes),
        ),
    ] = None
    models_max: Annotated[
        int, Option(help="Most models that are loaded at once; 0: as many as fit.", heading=MODELS, least=0)
    ] = 0
    keep_alive: Annotated[
        str,
        Option(
            help="How long a model stays loaded without requests: seconds, 30m, 1h; -1: until another needs the room.",
            about='how long a model stays loaded without requests: seconds, "30m"; "-1": until another needs the room',
            heading=MODELS,
            flag=Flag(metavar="DURATION"),
        ),
    ] = "-1"
    model_wait_s: Annotated[
        float,
        Option(
            help="Seconds that a request waits while other models answer, or the engine sleeps; 0: refused at once.",
            about="seconds that a request waits for room, or for an engine that sleeps; 0: it is refused at once",
            heading=MODELS, least=0, below=1e6, must_be="at least 0 and below 1,000,000 seconds",
            flag=Flag(name="model_wait", least=0.0),
        ),
    ] = 300.0  # fmt: skip

    limit_images: Annotated[int, _count("Most pictures in one request.")] = 16
    max_image_bytes: Annotated[int, _count("Largest file of a picture.")] = 20 * 1024 * 1024
    max_image_pixels: Annotated[int, _count("Most pixels of a picture, before it is made smaller for the model.")] = (
        32 * 1024 * 1024
    )
    max_kept_image_bytes: Annotated[
        int,
        _count(
            "Memory for pictures that requests name by their uuid alone.",
            "of pictures' files, all together, that are kept under their `uuid`",
        ),
    ] = 128 * 1024 * 1024
    image_timeout_s: Annotated[float, _seconds("Seconds that one picture may take to fetch, and to decode.")] = 10.0
    num_image_processes: Annotated[int, _count("Processes that decode pictures.")] = 2
    num_image_threads: Annotated[int, _count("Requests with pictures that are prepared at once.")] = 8
    allow_image_urls: Annotated[
        bool,
        Option(
            help="Fetch pictures by their URL, from the public internet.",
            about="fetch pictures by their URL, from the public internet; else pictures come in requests",
            heading=LIMITS,
        ),
    ] = False
    allow_image_hosts: Annotated[
        tuple[str, ...],
        _repeated(
            "--allow-image-host",
            "Fetch pictures from this host alone, or HOST:PORT; may be repeated. An address with its port may be a "
            "private one.",
            "fetch them from these hosts alone; an address with its port may be a private one",
            heading=LIMITS,
            metavar="HOST",
        ),
    ] = ()

    num_tokenizer_threads: Annotated[
        int,
        _count(
            "Threads that render templates and encode large prompts.",
            "threads that render chat templates and encode prompts, away from the event loop",
        ),
    ] = 2

    api_keys: Annotated[
        tuple[str, ...],
        _repeated(
            "--api-key",
            "Key that clients must send; may be repeated. Others can see it in the list of processes: rather use "
            "--api-key-file.",
            "keys that clients must send; none here and in `api_key_files`: every client is let in",
            variable="XSERV_API_KEY",  # with spaces between keys
        ),
    ] = field(default=(), repr=False)
    api_key_files: Annotated[
        tuple[str, ...],
        _repeated(
            "--api-key-file",
            "File of keys, one a line, perhaps with its terms; read again on SIGHUP.",
            "files of keys, one a line, perhaps with its terms; read again on SIGHUP",
            metavar="PATH",
        ),
    ] = ()
    admin_key_files: Annotated[
        tuple[str, ...],
        _repeated(
            "--admin-key-file",
            "File of keys for pausing, sleeping and new weights, which are off without it; read again on SIGHUP.",
            metavar="PATH",
        ),
    ] = ()
    weights_root: Annotated[
        str | None,
        Option(
            help="Folder of weights that /update_weights may read; without it, it reads shared memory alone.",
            heading=KEYS,
            flag=Flag(metavar="DIR"),
        ),
    ] = None
    max_requests_per_key: Annotated[
        int | None,
        Option(
            help="Open requests of one API key, unless its file has others; beyond it the answer is 429.",
            about="open requests of one key, unless its line has others; beyond it the answer is 429",
            heading=KEYS,
        ),
    ] = None
    tokens_per_minute_per_key: Annotated[
        int | None,
        Option(
            help="Tokens of prompts and answers in a minute of one API key, unless its file has others: 429.",
            about="tokens of prompts and answers in a minute of one key, unless its line has others: 429",
            heading=KEYS,
        ),
    ] = None
    share_prefix_cache: Annotated[
        bool,
        Option(
            help="Let holders of different keys share cached prefixes.",
            about="let holders of different keys share cached prefixes, whose timing tells who said what",
            heading=KEYS,
            flag=Flag(declarations=("--share-prefix-cache",)),
        ),
    ] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        _repeated(
            "--allowed-origin",
            "Site whose pages may ask (*: all); may be repeated.",
            'other sites whose pages may ask ("https://chat.example", "*": all)',
            metavar="ORIGIN",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        _repeated(
            "--allowed-host",
            "Name in the Host header (*: any); may be repeated.",
            "names in the Host header; None: any. `serve` sets it where it listens on loopback alone",
            metavar="NAME",
        ),
    ] = None
    kv_transfer_peers: Annotated[
        tuple[str, ...],
        _repeated(
            "--kv-transfer-peer",
            "Engine of another server, whose pages requests may name (kv_transfer_params); may be repeated.",
            "engines of other servers, whose pages requests may name (`kv_transfer_params`)",
            metavar="HOST:PORT",
        ),
    ] = ()
    ssl_certfile: Annotated[
        str | None,
        Option(
            help="Certificate, for TLS.",
            about="certificate, for TLS; this and `ssl_keyfile`, or neither",
            heading=KEYS,
            flag=Flag(metavar="PATH"),
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None, Option(help="The certificate's key.", heading=KEYS, flag=Flag(metavar="PATH"))
    ] = None

    drain_timeout_s: Annotated[
        float,
        Option(
            help="Seconds that open requests have after SIGTERM.",
            heading=OPERATIONS,
            least=0,
            below=1e6,
            must_be="at least 0 and below 1,000,000 seconds",
            flag=Flag(declarations=("--drain-timeout-s", "--drain-timeout"), least=0.0),
        ),
    ] = 10.0
    log_format: Annotated[
        Literal["text", "json"],
        Option(help="Lines of text, or of JSON.", about='"text" or "json", one object a line', heading=OPERATIONS),
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        Option(help="Least level that is logged.", heading=OPERATIONS),
    ] = "info"
    log_file: Annotated[
        str | None, Option(help="File of the log instead of stderr.", heading=OPERATIONS, flag=Flag(metavar="PATH"))
    ] = None
    log_prompts: Annotated[
        bool, Option(help="Write prompts to the log.", heading=OPERATIONS, flag=Flag(declarations=("--log-prompts",)))
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        Option(
            help="Address for OpenTelemetry traces (needs the extra otel).",
            heading=OPERATIONS,
            flag=Flag(metavar="URL"),
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, ServerConfigError)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ServerConfigError("ssl_certfile and ssl_keyfile belong together: give both, or neither")
        if self.allow_image_hosts and not self.allow_image_urls:
            raise ServerConfigError("allow_image_hosts says which hosts allow_image_urls is for: give both")
        for host in self.allow_image_hosts:
            try:
                Place.of(host)
            except ValueError:
                example = "images.example or 10.0.0.3:8080"
                raise ServerConfigError(f"allow_image_hosts: {host!r} is no host, such as {example}") from None
        for peer in self.kv_transfer_peers:
            if not _PEER.fullmatch(peer):
                raise ServerConfigError(f"--kv-transfer-peer is {peer!r:.80}, must be HOST:PORT")
        for origin in self.allowed_origins:
            if not is_origin(origin):
                examples = "https://chat.example, http://localhost:*, app://*, tauri://localhost, null or *"
                what = f"an origin without a path, such as {examples}"
                raise ServerConfigError(f"--allowed-origin is {origin!r}, must be {what}")


OPTIONS = option_fields(ServerConfig)
"""The table of the server's options: checks, flags and docs are made from it."""

ServerConfig.__doc__ = f"{ServerConfig.__doc__}\n\n{describe(ServerConfig)}"
