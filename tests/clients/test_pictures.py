"""OpenAI's Node SDK sends pictures, by data URI and by URL, whole and streamed, to the bundled model that reads them.
(Its Python SDK does in tests/server/test_demo_vision.py and tests/server/pictures.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from server.config import ServerConfig
from tests.clients.environments import NODE, node_modules
from tests.clients.test_clients import run_program
from tests.server.pictures.test_fetching import OK, says, web
from tests.server.real_server import serving_real
from tests.server.test_demo_vision import ANSWER, CHART, FOLDER, NUM_TOKENS, OPTIONS, QUESTION, URI


@pytest.mark.exhaustive
def test_openais_sdk_of_node(tmp_path: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("there is no npm")
    file = CHART.read_bytes()
    with web(says(f"{OK}\nContent-Type: image/png\nContent-Length: {len(file)}", file)) as place:
        config = ServerConfig(allow_image_urls=True, allow_image_hosts=(place,))
        asked = {
            "pictures": {"uri": URI, "url": f"http://{place}/chart.png"},
            "question": QUESTION, "answer": ANSWER, "numTokens": NUM_TOKENS,
        }  # fmt: skip
        with serving_real(FOLDER, config=config, **OPTIONS) as real:
            command = ["node", "--require", str(NODE / "loopback.cjs"), "--input-type=module", "-"]
            arguments = [real.url, real.model, json.dumps(asked)]
            with (NODE / "openai_pictures.mjs").open() as program:
                steps = run_program([*command, *arguments], tmp_path, cwd=node_modules(), stdin=program)
    assert len(steps) == 11
