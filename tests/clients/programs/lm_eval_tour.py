"""lm-eval with tasks made here: answers, likelihoods with the server's tokenizer, and a text's perplexity."""

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import check_remote_tokenizer_support
from steps import BASE, MODEL, URL, run, step

os.environ["OPENAI_API_KEY"] = "none"
SUMS = [(17, 25), (3, 4), (61, 22), (120, 30), (8, 9), (45, 45)]
home = Path(os.environ["HOME"])
(home / "sums.jsonl").write_text(
    "".join(json.dumps({"a": a, "b": b, "right": str(a + b), "wrong": str(a + b + 1)}) + "\n" for a, b in SUMS),
    encoding="utf-8",
)
ABOUT = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(home / "sums.jsonl")}},
    "test_split": "test",
}
QUESTION = "What is {{a}} plus {{b}}?"
TURNS = f"<|user|>{QUESTION}<|assistant|>"
"""As the model's template writes it: lm-eval applies no template where its tokens are the server's."""
ANSWERS = {
    **ABOUT,
    "doc_to_text": QUESTION,
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"max_gen_toks": 8, "do_sample": False, "until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}
COMPLETIONS = {**ANSWERS, "task": "completions", "doc_to_text": TURNS}
CHOICES = {
    **ABOUT,
    "doc_to_text": TURNS,
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{[wrong, right]}}",
    "doc_to_target": 1,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
TEXT = {
    **ABOUT,
    "task": "text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "The sum of {{a}} and {{b}} is {{right}}.",
    "metric_list": [{"metric": "word_perplexity"}],
}


def evaluate(task, model, path, **settings):
    arguments = {"model": MODEL, "base_url": BASE + path, "num_concurrent": 4, "max_retries": 1, **settings}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        apply_chat_template=task is ANSWERS,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    return found["results"][task["task"]]


@step()
def tokenizer_is_found():
    assert check_remote_tokenizer_support(f"{BASE}/completions"), URL


@step()
def answers_by_chat():
    """A model that was trained on sums has them right."""
    assert evaluate(ANSWERS, "local-chat-completions", "/chat/completions")["exact_match,none"] == 1.0


@step()
def answers_by_completion():
    """Prompts are tokens that `/tokenize` made."""
    found = evaluate(COMPLETIONS, "local-completions", "/completions", tokenizer_backend="remote")
    assert found["exact_match,none"] == 1.0, found


@step()
def likelihoods():
    found = evaluate(CHOICES, "local-completions", "/completions", tokenizer_backend="remote")
    assert found["acc,none"] == 1.0, found


@step()
def perplexity():
    found = evaluate(TEXT, "local-completions", "/completions", tokenizer_backend="remote")
    assert 1 < found["word_perplexity,none"] < 1e30, found


run()
