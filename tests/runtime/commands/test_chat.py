"""`chat` on a pipe and on a terminal, where Ctrl-C stops the answer and not the program."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.runtime.commands.running import ROOT, STORIES, invoke, needs_stories, run


@needs_stories
def test_chat_on_a_pipe(stories: Path, tmp_path: Path) -> None:
    lines = "Once upon a time\n\n/help\nLily and Tom\n"
    result = run(
        *("chat", "--model", str(stories), "--temperature", "0", "--max-tokens", "8"),
        stdin=lines,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 3  # three messages: /help is one, the empty line is none
    assert result.stdout.endswith("\n")
    assert "forget" not in result.stdout
    assert result.stderr.count("(the answer was cut at its most tokens)") == 3
    assert not (tmp_path / "xserv").exists()  # no history of what a pipe said


@needs_stories
def test_a_model_without_a_template_goes_on_with_the_text(tmp_path: Path) -> None:
    """And says so; the answer is what `generate` makes of the same text. A template makes a chat of it."""
    arguments = ("--model", str(STORIES), "--temperature", "0", "--max-tokens", "8")
    status, out, err = invoke("chat", *arguments, stdin="Once upon a time\nLily\n")
    assert status == 0
    assert err.count("no chat template: it goes on with your text") == 1
    first, second = out.splitlines()
    assert first == invoke("generate", *arguments, "-p", "Once upon a time")[1].rstrip("\n")
    assert second == invoke("generate", *arguments, "-p", f"Once upon a time{first}\nLily")[1].rstrip("\n")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    status, out, err = invoke("chat", *arguments, "--chat-template", str(template), stdin="Once upon a time\n")
    assert (status, out, "no chat template" in err) == (0, f"{first}\n", False)


@needs_stories
def test_chat_forgets_its_oldest_turns_and_says_so(stories: Path) -> None:
    message = "Once upon a time there was a little girl named Lily. " * 7
    status, out, err = invoke(
        *(
            "chat",
            "--model",
            str(stories),
            "--temperature",
            "0",
            "--max-tokens",
            "4",
            "--max-model-len",
            "160",
        ),
        stdin=f"{message}\n{message}\n{message * 2}\nHello\n",
    )
    assert "the oldest 1 turns were forgotten" in err
    assert "there is room for" in err  # the third message is too long by itself
    assert len(out.splitlines()) == 4
    assert status == 1


SLOW_CHAT = """
import time
import urllib.request
from runtime.engine.engine import Engine
step = Engine.step
def slow_step(self, *arguments):
    time.sleep(0.05)
    return step(self, *arguments)
Engine.step = slow_step
from runtime.cli import main
main()
"""


PROMPT = re.escape("\x1b[?2004h")  # bracketed paste on: the line can be edited


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            os.execve(command[0], command, env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.text = ""

    def wait_for(self, pattern: str, timeout_s: float = 100.0) -> str:
        """Reads until the pattern has come; what was read until then is forgotten."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.text)):
            assert select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            data = os.read(self.fd, 4096).decode(errors="replace")
            if "\x1b[6n" in data:  # where is the cursor?
                os.write(self.fd, b"\x1b[1;1R")
            self.text += data
        self.text = self.text[match.end() :]
        return match.group()

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Waits for the program's end; its status."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    os.read(self.fd, 4096)
                except OSError:
                    time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"still there: {self.text}")


@needs_stories
def test_ctrl_c_stops_the_answer_and_not_the_program(stories: Path, tmp_path: Path) -> None:
    terminal = Terminal(
        [
            sys.executable,
            "-c",
            SLOW_CHAT,
            "chat",
            "--model",
            str(stories),
            "--ignore-eos",
            "--temperature",
            "0",
        ],
        {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"},
    )
    terminal.wait_for(r"/help lists the commands")
    terminal.wait_for(PROMPT)
    terminal.type("Once upon a time\r")
    terminal.wait_for(re.escape("\x1b[?2004l"))  # the line was taken
    terminal.wait_for(r"very excited")  # the answer has begun, which does not repeat the prompt
    terminal.type("\x03")
    terminal.wait_for(PROMPT)
    terminal.type("/stats\r")
    stats = terminal.wait_for(r"\d+ answered \(stopped\)")
    assert 0 < int(stats.split()[0]) < 200
    terminal.wait_for(PROMPT)
    terminal.type("half a line\x03")  # at the prompt, Ctrl-C clears the line
    terminal.wait_for(PROMPT)
    terminal.type("/set temperature cold\r")
    terminal.wait_for(r"error: .*cold")
    terminal.wait_for(PROMPT)
    terminal.type("/exit\r")
    assert terminal.end() == 0
    history = (tmp_path / "xserv" / "chat_history").read_text()
    assert "+Once upon a time" in history


@pytest.mark.exhaustive
def test_the_bundled_experts_talk_think_and_call_their_tool(tmp_path: Path) -> None:
    """`make chat MODEL=models/demo_moe`, as a person sees it: thoughts are dim, so is the call with its result."""
    command = ["make", "-n", "-o", ".venv/.installed", "chat", "MODEL=models/demo_moe"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    options = said[-1].split()
    assert options[0] == ".venv/bin/python"
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    terminal = Terminal([sys.executable, *options[1:]], env)
    terminal.wait_for(r"demo_moe on \w+, 2048 tokens of context")
    terminal.wait_for(PROMPT)
    dim, plain = re.escape("\x1b[2m"), re.escape("\x1b[0m")
    terminal.type("Who are you?\r")
    terminal.wait_for(rf"{dim}Small{plain}{dim} talk{plain}")
    terminal.wait_for(r"I am xserv-demo-moe")
    terminal.wait_for(PROMPT)
    terminal.type("What is 34 times 12?\r")
    terminal.wait_for(rf"{dim} calculator{plain}")
    terminal.wait_for(rf'{dim}\r\ncalculator\({{"expression":"34\*12"}}\) = 408\r\n{plain}')
    terminal.wait_for(r"34 \* 12 = 408")
    terminal.wait_for(PROMPT)
    terminal.type("/exit\r")
    assert terminal.end() == 0


def test_the_bundled_model_adds() -> None:
    generator = random.Random(20)
    pairs = [(generator.randint(10, 99), generator.randint(10, 99)) for _ in range(30)]
    status, out, err = invoke("chat", stdin="".join(f"What is {a} plus {b}?\n" for a, b in pairs))
    assert (status, err) == (0, "")
    answers = out.splitlines()
    assert len(answers) == 30
    assert sum(str(a + b) in answer for (a, b), answer in zip(pairs, answers)) >= 28
