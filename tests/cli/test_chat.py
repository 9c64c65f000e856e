"""``peftlab generate --chat``: a conversation, typed into a terminal or piped."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_cli import peftlab
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import DecodingOptions
from peftlab.pipelines.generate import Chat, GeneratedText, generate, load_writer
from peftlab.tasks.conversations import chat_ids
from tests.byte_tokens import byte_tokenizer
from tests.forked import python

ROOT = Path(__file__).resolve().parents[2]
# Writes BOS itself, beside a tokenizer that begins every text with one.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONTEXT = 2048
# The answers show whether the model sees what was said before.
ROWS = [[("name?", "I am Tom."), ("name?", "I said Tom.")]] * 4 + [[("name?", "I am Tom."), ("sing", "la " * 60)]] * 4


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", "PYTHONPATH": str(ROOT), "TERM": "dumb"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns the answers above, whose model calls another token than the template's the end."""
    place = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer(TEMPLATE, ["<|turn|>", "<|end|>"], bos="<s>", eos="</s>", adds_bos=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1, pad_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    turns = [
        [turn for asked, said in row for turn in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})]
        for row in ROWS
    ]  # fmt: skip
    (place / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    (place / "recipe.yaml").write_text(
        f"model: {place / 'model'}\ntask: text/chat\n"
        f"data: {{path: {place / 'rows.jsonl'}, validation: 1, too_long: truncate}}\nmethod: {{name: full}}\n"
        "train: {max_steps: 160, batch_size: 5, max_length: 128, lr: 3e-3, eval_every: 160}\nmerge: false\n"
        f"output_dir: {place / 'run'}\n"
    )
    done = peftlab("run", str(place / "recipe.yaml"))
    assert done.returncode == 0, done.stderr
    return place / "run"


def generated(*arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=text)


def test_piped_lines_are_turns_of_one_conversation(run: Path) -> None:
    asked = ("generate", "--target", str(run), "--chat", "--drafter", "lookup")
    done = python("-m", "peftlab", *asked, text="name?\n\nname?\r\n", **environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "I am Tom.\nI said Tom.\n", "history is kept, and answers end with the template's marker"
    assert done.stderr.count("ended by eos") == 2 and "tokens per target step" in done.stderr
    plain = generated("--target", str(run), "--chat", text="name?\n\nname?\n")
    assert (plain.exit_code, plain.stdout) == (0, done.stdout)
    empty = generated("--target", str(run), "--chat")
    assert (empty.exit_code, empty.stdout) == (0, "")


def test_mistakes(run: Path, stories: Path) -> None:
    for arguments, text, said in (
        (["--target", str(run), "--chat"], "x" * 3000, r"this message has 30\d\d tokens, and the model's context 2048"),
        (["--target", str(stories), "--chat"], "", "no chat template"),
        (["--target", str(stories)], "", "--prompt: missing"),
    ):
        found = generated(*arguments, text=text).exception
        assert isinstance(found, PeftlabError) and re.search(said, str(found)), found


class Terminal:
    """A process whose terminal this is."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background of a shell
            os.execve(sys.executable, [sys.executable, "-m", "peftlab", *arguments], environment())
        self.seen = ""

    def until(self, wanted: str, seconds: float = 120) -> str:
        """Return what appeared before ``wanted``, and that."""
        limit = time.monotonic() + seconds
        while wanted not in self.seen:
            assert select.select([self.descriptor], [], [], max(0, limit - time.monotonic()))[0], repr(self.seen)
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:  # the process has ended
                data = b""
            assert data, f"ended without {wanted!r}: {self.seen!r}"
            self.seen += data.decode()
        before, _, self.seen = self.seen.partition(wanted)
        return before + wanted

    def interrupt(self, wanted: str) -> None:
        """Press Ctrl-C until ``wanted`` appears: readline does not see a signal just before it waits for a key."""
        for _ in range(20):
            self.type("\x03")
            with suppress(AssertionError):
                self.until(wanted, 2)
                return
        raise AssertionError(wanted)

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def status(self) -> int:
        """Return the exit status, once it has ended."""
        while True:
            try:
                if not os.read(self.descriptor, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_terminal_session(run: Path) -> None:
    """Answers appear, Ctrl-C stops one and keeps the session, Ctrl-D ends it."""
    terminal = Terminal("generate", "--target", str(run), "--chat", "--max-new-tokens", "100000")
    try:
        terminal.until("Ctrl-D ends the chat")
        terminal.until("> ")
        terminal.type("name?\r")
        terminal.until("I am Tom.")
        terminal.until("> ")
        terminal.interrupt("Ctrl-D ends the chat")
        terminal.until("> ")
        terminal.type("sing\r")
        terminal.until("la la")  # it streams: there is more to come
        terminal.type("\x03")
        terminal.until("[stopped]")
        terminal.until("> ")
        terminal.type("x" * 2100 + "\r")
        terminal.until("shorten it")
        terminal.until("> ")
        terminal.type("name?\r")
        terminal.until("tokens/s")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.status() == 0
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise


def test_one_bos_and_the_templates_own_text(run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    messages = [{"role": "user", "content": "name?"}]
    ids = chat_ids(tokenizer, messages, "x")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer(tokenizer.decode(ids))["input_ids"].count(tokenizer.bos_token_id) == 2, "the trap"
    assert generate(str(run), "name?", chat=True).text == "I am Tom."


class TestChat:
    @pytest.fixture(scope="class")
    def writer(self, run: Path):
        return load_writer(str(run), options=DecodingOptions(max_new_tokens=400), chat=True)

    def test_what_is_remembered(self, writer) -> None:
        chat = Chat(writer)
        shown: list[str] = []
        answer = chat.ask("name?", shown.append)
        assert "".join(shown) == answer.text == "I am Tom." and answer.reason == "eos"
        assert chat.messages[-1] == {"role": "assistant", "content": "I am Tom."}

        def interrupt(piece: str) -> None:
            shown.append(piece)
            if "".join(shown).count("la") == 3:
                raise KeyboardInterrupt

        shown.clear()
        answer = chat.ask("sing", interrupt)
        assert answer.reason == "interrupt" and answer.text == "".join(shown)
        assert [turn["content"] for turn in chat.messages] == ["name?", "I am Tom.", "sing", answer.text]

        def at_once(piece: str) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(writer), "write", lambda *_, **__: at_once(""))
            chat.ask("sing", shown.append)
        assert len(chat.messages) == 4, "nothing was answered: nothing is remembered"

    def test_the_oldest_turns_make_room(self, writer) -> None:
        chat, said = Chat(writer), []
        for i in range(6):
            answer: GeneratedText = chat.ask(f"{i}" + "x" * 400, said.append)
            assert answer.reason in ("eos", "length")
            assert len(chat_ids(writer.pair.tokenizer, chat.messages, "x")) < CONTEXT
        assert chat.forgotten > 0 and chat.messages[0]["role"] == "user"
        assert chat.forgotten + len(chat.messages) == 12
        with pytest.raises(PeftlabError, match="shorten it"):
            chat.ask("x" * 2100, said.append)
        assert chat.forgotten + len(chat.messages) == 12, "the message that does not fit is not remembered"
