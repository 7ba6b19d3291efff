"""A transport of another library needs the functions of `Transport` alone: here pages lie in files of a folder."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.engine import Engine
from runtime.engine.messages import Source
from runtime.engine.transfer.identity import Identity
from runtime.engine.transfer.transport import Arrived, Ended, Pages, StaleLeaseError, Transport
from runtime.kv.kinds import State
from tests.runtime.engine.storing_engine import SETTINGS, make_requests
from tests.runtime.engine.test_stored_prefixes import len_vocabulary, write_case
from tests.runtime.engine.transfer.handing import answered_alone, handed_over, joined_engine, said
from tests.waiting import wait_until

END = "end"


class FolderTransport:
    """See `Transport`. An offer is a folder with a file for each call of ``offer``, and one at its end."""

    num_sent_bytes = num_received_bytes = num_pulls = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def address(self) -> str:
        return f"folder:{self._folder}"

    @property
    def num_open(self) -> int:
        return len(list(self._folder.iterdir()))

    def offer(self, lease: str, pages: Pages | None) -> bool:
        offer = self._folder / lease
        offer.mkdir(exist_ok=True)
        if pages is None:
            (offer / END).touch()
        else:
            (offer / f"{len(list(offer.iterdir())):04}").write_bytes(pickle.dumps(pages))
            self.num_sent_bytes += pages.num_bytes
        return True

    def pull(self, source: Source, arrived: Arrived, ended: Ended) -> None:
        threading.Thread(target=self._pull, args=(source, arrived, ended), daemon=True).start()

    def _pull(self, source: Source, arrived: Arrived, ended: Ended) -> None:
        offer = Path(source.address.removeprefix("folder:")) / source.lease
        if not offer.exists():
            ended(StaleLeaseError("there is no such offer"))
            return
        wait_until((offer / END).exists)
        for file in sorted(offer.iterdir()):
            if file.name != END:
                pages = pickle.loads(file.read_bytes())
                self.num_received_bytes += pages.num_bytes
                arrived(pages)
            file.unlink()
        offer.rmdir()
        self.num_pulls += 1
        ended(None)

    def has_sent(self, lease: str) -> bool:
        return True

    def drop(self, lease: str) -> None:
        offer = self._folder / lease
        if offer.exists():
            for file in offer.iterdir():
                file.unlink()
            offer.rmdir()

    def use(self, identity: Identity) -> None:
        self.close()

    def close(self, timeout_s: float = 0.0) -> None:
        for offer in self._folder.iterdir():
            self.drop(offer.name)


def with_folder(engine: Engine, folder: Path) -> FolderTransport:
    """Gives a joined engine this transport, beside its own."""
    folder.mkdir()
    made = FolderTransport(folder)
    assert engine.hand_overs is not None
    transport: Transport = made  # a type checker sees that it is one
    engine.hand_overs.transports["folder"] = transport
    addresses = (*engine.info.transfer_addresses, transport.address)
    engine.info = msgspec.structs.replace(engine.info, transfer_addresses=addresses)
    return made


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_six_functions_suffice(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    requests = make_requests(1, 24, len_vocabulary(model))
    known = answered_alone(model, requests, **settings)
    with (
        joined_engine(model, **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, **settings) as second,
    ):
        sends, takes = with_folder(first, tmp_path / "first"), with_folder(second, tmp_path / "second")
        assert said(handed_over(first, second, requests, "folder"), requests) == known
        stats = second.stats()
        assert stats.num_arrived == takes.num_pulls > 10
        assert stats.num_lost_transfers == 0
        assert stats.prefix_cache_restored > 0
        assert sends.num_sent_bytes >= takes.num_received_bytes > 0
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.stats().num_open_transfers == 0
