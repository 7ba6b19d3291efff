"""A layer's latent attention between its projections (MLA, https://arxiv.org/abs/2405.04434).

Chunks of few tokens take `_absorbed`: their queries go through the keys' map, and attend to latent rows as they are.
On a GPU long chunks (`Batch.long_chunks`) have their sequence's rows expanded to keys and values of all heads instead.
Both kinds may be in one batch: the chunks between two long ones are one piece, and each piece writes its own rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from runtime import ops
from runtime.backends import backend_of
from runtime.backends.checks import check_rows, fail
from runtime.batch import NO_LONG_CHUNKS, Batch, LongChunk
from runtime.linear.latent import LatentMaps
from runtime.linear.norm import RmsNorm
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor


class _Piece(NamedTuple):
    """Some neighbouring chunks, and their tokens; all arrays of `batch` but `query_start` begin there."""

    batch: Batch
    tokens: slice
    long: LongChunk | None


def latent_layer(
    q: Tensor, latent: Tensor, maps: LatentMaps, *, pages: Tensor, batch: Batch, group: int, rope: RopeTable,
    norm: RmsNorm, scale: float,
) -> Tensor:  # fmt: skip
    """Queries ``q [T, H head_dim]``, each head's rotated part last, and the latent projection ``[T, latent_dim +
    rotary_dim]``, either of which may be columns of wider rows -> results ``[T, H value_dim]``. Writes the tokens' rows
    to the pages. With adapters of the maps no chunk is expanded."""
    addend = maps.addend if batch.adapters is not None and maps.addend and not maps.addend.is_empty else None
    if addend is not None:
        batch = _unexpanded(batch)
    op, tokens, heads = "latent_layer", q.shape[0], maps.num_heads
    backend = backend_of(q.device)
    check_rows(op, "q", q, q.device, backend.ACTIVATIONS, (None, heads * maps.head_dim))
    check_rows(op, "latent", latent, q.device, q.dtype, (tokens, maps.row_dim))
    if maps.expansion is None and batch.long_chunks.chunks:
        raise fail(op, "batch.long_chunks", "are given, but these maps have no expansion")
    queries = attended = values = prepared = None
    if batch.long_chunks.chunks:
        values = Tensor.new((tokens, heads * maps.value_dim), q.dtype, q.device)
        slot_mapping = batch.slot_mappings[group]
        prepared = backend.latent_prepare(q, latent, maps, batch.positions, rope, norm, pages, slot_mapping)
        if batch.long_chunks.max_query_len:
            queries = Tensor.new((tokens, heads, maps.row_dim), q.dtype, q.device)
            attended = Tensor.new((tokens, heads * maps.latent_dim), q.dtype, q.device)
    for piece in _pieces(batch):
        own, part = piece.tokens, piece.batch
        if piece.long is not None:
            assert values is not None
            assert prepared is not None
            backend.latent_expanded(prepared, pages, part, group, piece.long, maps, scale, values)
            continue
        given = ops.latent_queries(
            q[own], latent[own], maps, part.positions, rope=rope, norm=norm, pages=pages,
            slot_mapping=part.slot_mappings[group], out=None if queries is None else queries[own],
            added=None if addend is None else partial(addend.add_queries, batch=batch),
        )  # fmt: skip
        whole = given if queries is None else queries
        found = ops.latent_attention(whole, pages, part, group, scale=scale, value_dim=maps.latent_dim, out=attended)
        results = ops.latent_values(found[own], maps, out=None if values is None else values[own])
        if values is None:
            return results if addend is None else addend.add_values(found, results, batch)
    assert values is not None
    return values


def _unexpanded(batch: Batch) -> Batch:
    """The batch without long chunks, once for all layers."""
    if not batch.long_chunks.chunks:
        return batch
    if "unexpanded" not in batch.plans:
        batch.plans["unexpanded"] = replace(batch, long_chunks=NO_LONG_CHUNKS, plans={})
    made: Batch = batch.plans["unexpanded"]
    return made


def _pieces(batch: Batch) -> list[_Piece]:
    """The batch in pieces, once for all layers. A piece's `query_start` counts from the batch's first token."""
    if not batch.long_chunks.chunks:
        return [_Piece(batch, slice(0, batch.num_tokens), None)]
    if "latent pieces" not in batch.plans:
        found, seq, token = [], 0, 0
        for chunk in batch.long_chunks.chunks:
            if chunk.seq > seq:
                found.append(_piece(batch, seq, chunk.seq, token, chunk.first_token, None))
            seq, token = chunk.seq + 1, chunk.first_token + chunk.num_tokens
            found.append(_piece(batch, chunk.seq, seq, chunk.first_token, token, chunk))
        if seq < batch.num_seqs:
            found.append(_piece(batch, seq, batch.num_seqs, token, batch.num_tokens, None))
        batch.plans["latent pieces"] = found
    pieces: list[_Piece] = batch.plans["latent pieces"]
    return pieces


def _piece(batch: Batch, seq: int, last_seq: int, token: int, last_token: int, chunk: LongChunk | None) -> _Piece:
    tokens, seqs = slice(token, last_token), slice(seq, last_seq)
    part = replace(
        batch, token_ids=batch.token_ids[tokens], positions=batch.positions[tokens],
        query_start=batch.query_start[seq : last_seq + 1], seq_lens=batch.seq_lens[seqs],
        slot_mappings=tuple(each[tokens] for each in batch.slot_mappings),
        block_tables=tuple(each[seqs] for each in batch.block_tables),
        max_query_len=batch.long_chunks.max_query_len if chunk is None else chunk.num_tokens,
        long_chunks=NO_LONG_CHUNKS, plans={},
    )  # fmt: skip
    return _Piece(part, tokens, chunk)
