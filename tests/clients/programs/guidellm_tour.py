"""guidellm: short benchmarks of chat and of plain completions, with prompts made of the model's own tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

from steps import KIND, MODEL, URL, metric, run, step

home = Path(os.environ["HOME"])
TOKENIZER = sys.argv[4]
"""The folder with the bundled model's tokenizer."""
DONE = "vllm:request_success_total", ""


def benchmark(name, request_format, *profile):
    report = home / f"{name}-{KIND}.json"
    before = metric(*DONE)
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}",
        "--profile", ",".join(profile),
        "--constraint", "kind=max_requests,count=8",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-700:] + done.stderr[-700:]
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics = found["metrics"]
    assert (metrics["request_totals"]["successful"], metrics["request_totals"]["errored"]) == (8, 0), metrics
    assert metrics["output_token_count"]["successful"]["mean"] == 8, metrics["output_token_count"]
    assert metric(*DONE) - before >= 8
    return metrics["prompt_token_count"]["successful"]["mean"]


@step()
def chat():
    assert benchmark("chat", "/v1/chat/completions", "kind=synchronous") > 32  # its template's tokens, too


@step()
def completions():
    assert benchmark("completions", "/v1/completions", "kind=concurrent", "streams=2") >= 32


run()
