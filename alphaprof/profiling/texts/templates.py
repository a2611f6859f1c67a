"""Chat templates, rendered in a process of their own: a template is a program that comes with a model, and may never end.

An alarm ends that process where a prompt takes too long, whatever the template is doing; its memory has a limit as well.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from alphaprof.errors import DataUnreadable, ModelUnloadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 10  # for one prompt
MEMORY = 4 << 30  # bytes of address space of that process
# A template may write at most LENGTH characters, and LENGTH_PER_BYTE more for each byte of its request.
LENGTH, LENGTH_PER_BYTE = 1 << 20, 8
FOR_TEMPLATES = {"tools", "documents", "chat_template"}  # settings of transformers that templates see, or are
SERVE = "from alphaprof.profiling.texts.templates import serve; serve()"
REFUSED, WRITTEN, TOO_LONG = b"r", b"w", b"l"
READY = b"ready for chats\n"


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], where: str
) -> str:
    """The prompt that a tokenizer's chat template writes for a chat, the model's turn begun; `variables`: its own options.

    Raises `DataUnreadable` where the template refuses the chat, and `ModelUnloadable` where it needs more than `SECONDS`,
    `MEMORY` or `LENGTH`, or its process does not start. `where` names the chat.
    """
    from transformers import PreTrainedTokenizerBase

    try:
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:  # code, no template
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables))
        settings = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - FOR_TEMPLATES
        if not messages or (odd := sorted(settings & variables.keys())):
            raise ValueError(f"{odd[0]} is not a variable of a template" if messages else "it holds no message")
        variables = dict(variables)
        template = tokenizer.get_chat_template(variables.pop("chat_template", None), variables.get("tools"))
        chat = [{name: value for name, value in turn.items() if value is not None} for turn in messages]
        request = pickle.dumps((SECONDS, template, chat, {**tokenizer.special_tokens_map, **variables}))
    except Exception as error:  # of tokenizers, or of values that have no bytes
        raise _refusal(where, str(error)) from error
    with _lock:
        status, text = _answer(request)
    if status == REFUSED:
        raise _refusal(where, text)
    if status == WRITTEN:
        return text
    limits = f"needs more than {SECONDS} seconds or {MEMORY >> 30} GiB"
    reason = "writes far more than its chat holds" if status == TOO_LONG else limits
    hint = "take the model's files from where they were published, or render prompts yourself and give them as prompt_ids"
    raise ModelUnloadable(f"{where}: the model's chat template {reason}", hint)


def _refusal(where: str, reason: str) -> DataUnreadable:
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "")
    return DataUnreadable(f"{where}: the chat template refuses it: {first[:200]}", "check roles and chat_options")


_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def _answer(request: bytes) -> tuple[bytes, str]:
    """`WRITTEN` and the prompt, `REFUSED` and the reason, or nothing where the process was ended. Raises `ModelUnloadable`
    where it does not start.
    """
    try:
        if _process is None or _process.poll() is not None:
            _start()
        process = cast("subprocess.Popen[bytes]", _process)
        _send(cast("BinaryIO", process.stdin), request)
        answer = _receive(cast("BinaryIO", process.stdout))
    except (BrokenPipeError, EOFError):
        stop()
        return b"", ""
    except BaseException:  # an interrupt: the answer would be taken for that to the next request
        stop()
        raise
    return answer[:1], answer[1:].decode("utf-8", "surrogatepass")


def _start() -> None:
    """Start the process and wait until it is ready. Raises `ModelUnloadable`."""
    global _process
    reason = ""
    try:
        _process = subprocess.Popen(  # noqa: S603 (this very interpreter)
            [sys.executable, "-P", "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        # What runs before `serve`, like a sitecustomize, may have printed something.
        if any(line.endswith(READY) for line in cast("BinaryIO", _process.stdout)):
            return
    except OSError as error:
        reason = f": {error.strerror}"
    hint = f"this prints why: {sys.executable} -c '{SERVE}' < {os.devnull} (limits on memory or processes are one reason)"
    raise ModelUnloadable(f"the process that renders chat templates does not start{reason}", hint)


@atexit.register
def stop() -> None:
    """End the process, if there is one."""
    global _process
    process, _process = _process, None
    if process is not None:
        process.kill()
        process.communicate()


def serve() -> None:
    """What the process does: answers requests from its standard input until that ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imports and libraries print is no answer
    from transformers.utils.chat_template_utils import render_jinja_template

    # The module is not on every system; a lower limit may hold already, and macOS has none.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers.write(READY)
    answers.flush()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, in the middle of anything
    with contextlib.suppress(EOFError, MemoryError):
        while True:
            request = _receive(requests)
            seconds, template, chat, variables = pickle.loads(request)  # noqa: S301 (from the parent process)
            signal.alarm(seconds)
            _send(answers, _rendered(template, chat, variables, len(request), render_jinja_template))
            signal.alarm(0)


def _rendered(
    template: str, chat: list[Any], variables: dict[str, Any], size: int, render: Callable[..., tuple[list[Any], Any]]
) -> bytes:
    """The answer to a request of some bytes, its kind first. Raises `MemoryError`."""
    try:
        written, _ = render([chat], chat_template=template, add_generation_prompt=True, **variables)
        text = str(written[0])
    except MemoryError:
        raise
    except Exception as error:  # templates raise jinja's errors and those of whatever they call
        return REFUSED + (str(error) or type(error).__name__)[:1000].encode("utf-8", "surrogatepass")
    if len(text) > LENGTH + LENGTH_PER_BYTE * size:
        return TOO_LONG
    return WRITTEN + text.encode("utf-8", "surrogatepass")


def _send(stream: BinaryIO, content: bytes) -> None:
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def _receive(stream: BinaryIO) -> bytes:
    """What `_send` wrote. Raises `EOFError` where the stream ends before."""
    header = stream.read(8)
    size = int.from_bytes(header, "little")
    content = stream.read(size) if len(header) == 8 else b""
    if len(header) < 8 or len(content) < size:
        raise EOFError
    return content
