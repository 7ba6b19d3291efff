"""Messages between the engine and its clients: plain tagged structs, never pickle.

The same types pass between threads and, encoded by msgspec (``wire``), between processes. Times are seconds of
``time.monotonic()``, which all processes of a machine share; token ids are ints; the only texts are ``error`` and
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

from runtime.engine.checks import check_texts
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.transfer.identity import Identity
from runtime.images.patches import Rule
from runtime.kv.kinds import FULL, AnyKind, has_states, window_of
from runtime.pooling import PoolingInfo, PoolingTask

ErrorCode = Literal[
    "unsatisfiable_request", "invalid_grammar", "stale_lease", "invalid_extra_args", "logits_processor_failed"
]  # fmt: skip
FinishReason = Literal["stop", "length", "abort", "error"]

EngineState = Literal["ready", "draining", "starting", "unloaded", "down", "closing"]
"""Whether requests are accepted. "draining": open requests finish before a restart or an unloading; "starting": soon,
or soon again; "unloaded": when it is reloaded; "down": broken, until the next start or for good; "closing": closed, or
about to be."""


MissReason = Literal["unseen", "evicted", "no_checkpoint", "prompt_logprobs"]
"""Why tokens were not found in the prefix cache: no request had them; they, or the state after them, were evicted;
their pages are there, but no state after them was kept; or log probabilities of the prompt have to be computed."""

MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


ITERATION_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of ``EngineStats.iteration_token_counts``, vLLM's."""


class ImageItem(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a prompt.

    digest       of its patches and its grid: images with the same digest are taken to be the same
    first_token  index of its first token in the prompt; its tokens are ``ImageSupport.token_id``
    rows, columns  of patches
    patches      uint8, ``rows * columns`` of ``ImageSupport.patch_bytes`` each, those of a token together
    """

    digest: bytes
    first_token: int
    rows: int
    columns: int
    patches: bytes


class PoolingRequest(msgspec.Struct, frozen=True):
    """A prompt whose hidden states after the final norm are wanted, not an answer. Raises ``RequestError``.

    pooling       one of ``POOLINGS``, or several joined by "+"; None: the model's own
    images        the prompt's; encoded images are shared within a ``cache_salt``
    task          a vector of any length, or the labels' scores before an activation; or either of every token
    second_from   the first token of the second of two texts
    num_unpooled  first tokens that are read, but not pooled
    """

    token_ids: Sequence[int]
    pooling: str | None = None
    images: tuple[ImageItem, ...] = ()
    cache_salt: str | None = None
    task: PoolingTask = "embed"
    second_from: int | None = None
    num_unpooled: int = 0

    def __post_init__(self) -> None:
        check_texts(self, "pooling", "cache_salt")  # an engine's process could not read others


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter: its folder, and the digest of the content that was there when it was loaded, hexadecimal."""

    name: str
    path: str
    digest: str

    @classmethod
    def of(cls, name: str, path: str, numbers: Iterable[float]) -> AdapterRef:
        """From the digest's bytes as numbers, as ``EngineClient.load_adapter`` returns them."""
        return cls(name=name, path=path, digest=bytes(int(each) for each in numbers).hex())


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A choice that another engine has begun.

    token_ids    its tokens so far; they were delivered, and are not output again
    mirostat_mu  mirostat's mu after them; None without it
    has_ended    nothing of it is left to do
    """

    token_ids: list[int] = []
    mirostat_mu: float | None = None
    has_ended: bool = False


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine hands requests over.

    secret        of the fleet, whose engines on this machine share memory; empty: they do not
    host, port    of this machine, where engines on other machines take pages; "": none do. Port 0: any
    foreign_secret  that those know, if it is not the fleet's
    most_bytes    of pages that wait to be taken, and of those that wait for their requests
    library       that carries pages between machines
    """

    secret: bytes = b""
    host: str = ""
    port: int = 0
    foreign_secret: bytes = b""
    most_bytes: int = 1 << 30
    library: str = "tcp"


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Pages that another engine offers.

    address    of its transport
    lease      names the offer, unguessable
    block_ids  what the offer must hold, as its sender named them; empty: whatever it holds
    is_foreign a client has named it: without the offer the request fails, and is not computed anew
    is_early   the sender may not have made the offer yet
    """

    address: str
    lease: str
    block_ids: list[int] = []
    is_foreign: bool = False
    is_early: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prompt to continue.

    request_id        unique among the open requests
    prompt_token_ids  at least one id
    eos_token_ids     ids that end a choice unless ``params.ignore_eos``; the sender takes them from
                      ``EngineInfo.eos_token_ids``
    priority          smaller is admitted first; equal ones in order of arrival
    cache_salt        the request shares cached prefixes only with requests of the same salt
    tenant, tenant_weight  the fair policy charges the tenant for its tokens, or the salt if it names none; a tenant's
                      share of the engine is proportional to its weight, 1.0 by default
    ttft_target_s, tpot_target_s  when its first token is due, and each following one, under the deadline policy;
                      None for the config's
    arrival_time_s    when the user's request came in; 0.0 for the time of submission
    speculates        its tokens may be speculated; False: each is sampled in a step of its own
    prediction        token ids that the answer may repeat: they are proposed as drafts while it follows them
    images            in prompt order
    turn_start_id     the token that opens a turn of a chat: later prompts may leave this one before it, so that models
                      with states keep theirs there
    shows_difference  its first output says which tokens the cache has instead (``EngineOutput.cached_ids``)
    adapter           whose weights are added to the model's for this request
    begun             the beginning of each choice, if another engine has computed one; empty: none has
    lease             its prompt's pages are offered under this lease, and each choice leaves after its first token
                      (``EngineOutput.is_handed_over``); empty: it stays
    is_expected       the engine that goes on has been told of the lease
    may_relay         after its first token it may go on here, until its pages are sent
    source            where pages of its prompt come from, which it waits for
    restarts          if the weights change, it may begin again although it has sent outputs; else it ends with "abort"
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    arrival_time_s: float = 0.0
    speculates: bool = True
    prediction: list[int] = []
    images: tuple[ImageItem, ...] = ()
    turn_start_id: int | None = None
    shows_difference: bool = False
    adapter: AdapterRef | None = None
    begun: list[Begun] = []
    lease: str = ""
    is_expected: bool = False
    may_relay: bool = False
    source: Source | None = None
    restarts: bool = False
    tenant: str | None = None
    tenant_weight: float = 1.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's log probability under the raw logits, its 1-based rank, and the most probable alternatives (as many
    as were requested, most probable first)."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class PrefixMiss(msgspec.Struct, frozen=True, gc=False):
    """Why a prompt was not found whole: the reason of most of its missed tokens; ``first_difference``, its first token
    that differs from all prompts in the cache; ``checkpoint``, the tokens that were found."""

    reason: MissReason
    first_difference: int
    checkpoint: int


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of ``time.monotonic()``; None for events that did not happen."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None


class ProposalCounts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Draft tokens of one choice that were tried, and accepted; and the counts of both that came from its request's
    prediction."""

    num_tried: int = 0
    num_kept: int = 0
    num_tried_of_prediction: int = 0
    num_kept_of_prediction: int = 0


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The output of one step for one choice of a request.

    index             the choice, 0 … n-1
    new_token_ids     the ids of this step, including an id that ended the choice (EOS, stop id)
    logprobs          one entry an id if requested, else None
    prompt_logprobs   on the first output of choice 0 if requested: one entry a prompt token, the first None
    num_cached_tokens on the first output of a choice: prompt tokens that were found in the prefix cache or shared with
                      another choice
    prefix_miss       with it: why no more of them were, if any more could have been
    cached_ids        with it, if the request shows the difference: the tokens that another prompt of its salt has from
                      ``prefix_miss.first_difference`` on; ids of pictures' tokens are none of the vocabulary
    finish_reason     None while the choice goes on. "stop": EOS or a stop id; "length": max_tokens or the
                      context's end; "abort": cancelled or the engine closed; "error": see ``error``
    stop_reason       the id of ``stop_token_ids`` that ended the choice, None for EOS
    times             on the last output of a choice
    proposals         on the last output, too, if tokens were speculated
    error_code        with "error", if the request itself was at fault: its fields left no token to sample, or its
                      grammar could not be followed; or if a logits processor failed; ``error`` has the reason
    engine_died       with "error": the engine failed, not this request, which may be sent again later
    mirostat_mu       mirostat's mu after the last of the tokens
    offered           on the last output of a request with a lease: what is offered under it
    is_handed_over    the choice's last output here, without a ``finish_reason``: another engine goes on with it
    begins_again      the choice's outputs before this one do not count: the weights have changed
    weight_version    of the weights that computed all of the choice's tokens so far; empty if none did
    num_restarts      how often the request began again
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    num_prompt_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    times: RequestTimes | None = None
    num_cached_tokens: int | None = None
    error_code: ErrorCode | None = None
    engine_died: bool = False
    proposals: ProposalCounts | None = None
    prefix_miss: PrefixMiss | None = None
    cached_ids: list[int] = []
    mirostat_mu: float | None = None
    is_handed_over: bool = False
    offered: Source | None = None
    begins_again: bool = False
    weight_version: str = ""
    num_restarts: int = 0

    @property
    def is_last(self) -> bool:
        """Whether no more of this choice comes from this engine."""
        return self.finish_reason is not None or self.is_handed_over


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's state now, and its counters since it started.

    num_running, num_waiting        choices in the running batch; requests and preempted choices in the queue
    kv_cache_usage                  used fraction of the blocks, 0 … 1
    num_preemptions, num_steps      since the start
    prompt_tokens, generation_tokens  of admitted requests, without recomputation; sampled tokens
    num_requests, num_errors        admitted so far; choices that ended with "error"
    last_step_s                     monotonic time of the end of the last step (the loop's heartbeat)
    num_cached_blocks               free blocks whose content is in the prefix cache
    prefix_cache_queries, prefix_cache_hits  tokens of sequences that started for the first time, and how many of
                                those were found; prefix_cache_evictions: cached blocks that were evicted;
                                prefix_cache_missed: the tokens not found, by ``MISS_REASONS``;
                                prefix_cache_restored: those read back from a store
    num_swaps                       preemptions that swapped
    swapped_out_blocks, swapped_in_blocks  blocks moved to the host and back, evicted prefixes included
    num_host_blocks, num_free_host_blocks  the swap space, and the part that a swapped sequence could get
    num_decode_graphs, decode_graph_bytes  recorded so far, and device memory of them and their arrays
    num_graph_steps                 steps that ran as a decode graph, since the start
    num_recorded_forwards, num_forward_steps  recorded passes of other steps, such as those with prompts; steps run so
    num_failed_graphs               failed recordings of either kind
    num_paused                      requests that are paused until their outputs are read
    num_waiting_tokens              prompt tokens of requests of which nothing has been scheduled
    rank_step_s, rank_waited_s      of each of several ranks: seconds in steps, and the part spent waiting for
                                another stage; not measured on GPUs
    num_drafts, num_draft_tokens, num_accepted_tokens  of speculation: drafts (one a sequence and step), their tokens,
                                and accepted tokens; accepted_by_position: acceptances of the first draft token, the
                                second, ...; empty without speculation
    num_offered, num_arrived        requests whose pages were offered to other engines, and that came with pages of
                                another; num_lost_transfers: those of which not all came, so that they were computed
    transfer_sent_bytes, transfer_received_bytes  of these pages; num_open_transfers: offers and arrivals that are not
                                over
    sleep_level                     0 while it is awake; of several engines the highest
    iteration_token_counts          steps by their tokens: up to each of ``ITERATION_TOKEN_BOUNDS``, and above the
                                last; empty if not counted. iteration_tokens: their sum
    """

    num_running: int
    num_waiting: int
    max_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_cache_usage: float
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    num_requests: int
    num_errors: int
    last_step_s: float
    num_cached_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_evictions: int = 0
    prefix_cache_missed: tuple[int, ...] = ()
    prefix_cache_restored: int = 0
    num_swaps: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_decode_graphs: int = 0
    decode_graph_bytes: int = 0
    num_graph_steps: int = 0
    num_failed_graphs: int = 0
    num_recorded_forwards: int = 0
    num_forward_steps: int = 0
    num_waiting_tokens: int = 0
    num_paused: int = 0
    iteration_token_counts: tuple[int, ...] = ()
    iteration_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    sleep_level: int = 0
    rank_step_s: tuple[float, ...] = ()
    rank_waited_s: tuple[float, ...] = ()
    num_offered: int = 0
    num_arrived: int = 0
    num_lost_transfers: int = 0
    transfer_sent_bytes: int = 0
    transfer_received_bytes: int = 0
    num_open_transfers: int = 0


class RoutingStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of the router of several engines since its start.

    policy            see ``EngineConfig.routing_policy``
    num_requests      sent to each engine when they came
    num_continued     continued by each engine after another one's first token; ``num_handed_over`` of all
    num_found_tokens  prompt tokens that it expected in the engine's cache
    num_moved         requests sent elsewhere than to the engine with their prefix, which was overloaded
    num_digests       block contents that it knows of now
    num_untaken       reported contents for which it had no room
    num_recomputed    requests that were begun again elsewhere, since their engine died
    """

    policy: str
    num_requests: list[int]
    num_found_tokens: int
    num_moved: int
    num_digests: int
    num_untaken: int
    num_continued: list[int] = []
    num_recomputed: int = 0

    @property
    def num_handed_over(self) -> int:
        return sum(self.num_continued)


class CacheGroupInfo(msgspec.Struct, frozen=True):
    """Layers that share a block table: see ``runtime.kv.groups``. Its blocks have room for ``num_padding`` layers more.
    ``pool`` has its blocks."""

    kind: AnyKind
    num_layers: int
    num_padding: int
    pool: int = 0

    @property
    def window(self) -> int | None:
        """The attention window in tokens; None for full attention and for states."""
        return window_of(self.kind)


class PoolInfo(msgspec.Struct, frozen=True):
    """The blocks of one size: how many there are, and the bytes of one, over all ranks."""

    num_blocks: int
    block_bytes: int


class RankInfo(msgspec.Struct, frozen=True):
    """One of several ranks: it has the layers of its stage from ``first_layer`` to before ``end_layer``, and of these
    its part of the weights and of the KV cache."""

    number: int
    stage: int
    first_layer: int
    end_layer: int
    weight_bytes: int
    kv_cache_bytes: int


class ImageSupport(msgspec.Struct, frozen=True):
    """How a model reads images.

    token_id    of each image token
    rule        how they are resized and cut into patches
    max_tokens  most image tokens of a request
    has_axes    tokens have positions on three axes; False: their index alone
    frame       tokens before and after an image's, which templates leave out; None if there are none
    frame_sign  what templates write for them and the image's: the first token, or the image's
    line_ends   the last token of each line of an image's tokens, and of the last line; None if lines have no ends
    most_whole  most tokens of adjacent images whose tokens attend to each other, so that one step computes
                them; None if images may be cut
    """

    token_id: int
    rule: Rule
    max_tokens: int
    has_axes: bool
    frame: tuple[int, int] | None = None
    frame_sign: Literal["begin", "picture"] = "begin"
    line_ends: tuple[int, int] | None = None
    most_whole: int | None = None

    @property
    def patch_bytes(self) -> int:
        return 3 * self.rule.patch_size**2

    def picture_ids(self, lines: int, across: int) -> list[int]:
        """The tokens of an image of such a grid."""
        if self.line_ends is None:
            return [self.token_id] * (lines * across)
        line_end, end = self.line_ends
        ids = [*[self.token_id] * (across - 1), line_end] * lines
        return [*ids[:-1], end]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Static facts about the engine for its clients.

    max_model_len   most tokens of prompt and output together
    vocab_size      ids are in [0, vocab_size)
    eos_token_ids   of the generation config, or of the config
    max_waiting, max_waiting_tokens  most waiting requests, and most prompt tokens of them together
    scheduling_policy  "fcfs" takes no priority, only "deadline" takes targets
    quantization    of the weights as loaded, or "none"; ``dtype`` is that of unquantised values
    kv_cache_dtype  of the KV pages
    kv_cache_bytes, weight_bytes  device memory held by each
    cache_groups    of the layers, in block table order; a block is a page of one of them
    pools           of the blocks; empty: one
    images          None if the model reads none
    longrope_threshold   longer prompts are rotated otherwise, and share no prefixes with shorter ones
    ranks           of a split model; empty for one in one piece
    mapped_bytes    of tables that are not among the weights: read a row a token, in their files or the host's memory
    pooling         how the model embeds and classifies
    exact           log probabilities are the same in any batch
    transfer_addresses, identity  where pages are offered to other engines, and what these must have in common
    logits_processors  their names
    logprobs_mode   what is told as a token's log probability
    max_loras, max_lora_rank  adapters on the device at a time, and their largest rank; 0: it takes none
    """

    model_name: str
    model_path: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    scheduling_policy: str = "priority"
    max_waiting_tokens: int = 2**63 - 1
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    cache_groups: tuple[CacheGroupInfo, ...] = (CacheGroupInfo(FULL, 0, 0),)
    pools: tuple[PoolInfo, ...] = ()
    images: ImageSupport | None = None
    longrope_threshold: int | None = None
    ranks: tuple[RankInfo, ...] = ()
    mapped_bytes: int = 0
    pooling: PoolingInfo = PoolingInfo()
    exact: bool = False
    max_loras: int = 0
    max_lora_rank: int = 0
    logits_processors: tuple[str, ...] = ()
    logprobs_mode: str = "raw_logprobs"
    transfer_addresses: tuple[str, ...] = ()
    identity: Identity | None = None

    @property
    def has_states(self) -> bool:
        """Whether some layers hold a state instead of keys and values."""
        return has_states(group.kind for group in self.cache_groups)


class ChunkView(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens ``start : start + count`` of a choice, computed in one step; those from ``num_prompt_tokens`` on were
    sampled by it. ``arrival_s``: ``time.monotonic()`` when the request came in. ``miss``, with the first tokens: why no
    more of the prompt was in the prefix cache."""

    request_id: str
    index: int
    start: int
    count: int
    num_prompt_tokens: int
    arrival_s: float
    miss: PrefixMiss | None = None


class RankSpan(msgspec.Struct, frozen=True):
    """A step of one of several ranks; for the first `waited_s` seconds it waited for another stage."""

    rank: int
    start_s: float
    duration_s: float
    waited_s: float


class StepView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step, for observers.

    step                      counts planned steps; a few have no view
    start_s, duration_s       ``time.monotonic()`` of its beginning, and seconds
    num_running, num_waiting  when it was planned
    num_free_blocks           after it; ``num_cached_blocks`` of them are in the prefix cache
    preempted                 ids of the requests that gave up blocks for it
    block_map                 every block in order, run-length: "12u5w3s40c900f" is 12 used by one choice, 5 more in
                              groups with a window, 3 shared by several, 40 cached, 900 empty; at most four times a
                              second, else None
    engine                    the number of the engine that ran it
    ranks                     steps of its ranks since the previous view, if there are several: at most 64 each
    """

    step: int
    start_s: float
    duration_s: float
    chunks: list[ChunkView]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    preempted: list[str]
    block_map: str | None = None
    engine: int = 0
    ranks: list[RankSpan] = []
