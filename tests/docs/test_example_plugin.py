"""The plugin that `docs/write-a-plugin.md` walks through does what the page says, and needs the contract only."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path

import pytest
from doc_pages import DOCS, Block, Reader, blocks
from mlx_lm import load, stream_generate

from mlx_lm_tiered.bench.server import reserved_port
from support.models import TINY, document

PAGE = list(blocks(DOCS / "write-a-plugin.md"))
MODEL = TINY["llama"]
MAY_IMPORT = {"__future__", "mlx", "mlx_lm", "mlx_lm_hooks"} | {"argparse", "collections", "hashlib", "json", "os", "pathlib", "typing"}


def install(project: Path) -> Path:
    """What pip makes of a project without anything to build: a directory for PYTHONPATH."""
    meta = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = project / f"{meta['name']}-{meta['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {meta['name']}\nVersion: {meta['version']}\n")
    groups = meta["entry-points"].items()
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups))
    return project


@pytest.mark.parametrize("block", [block for block in PAGE if block.language == "python"], ids=lambda block: block.title)
def test_it_imports_the_contract_only(block: Block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            assert {name.name.partition(".")[0] for name in node.names} <= MAY_IMPORT
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None and node.module.partition(".")[0] in MAY_IMPORT


def expected(prompt: str, tokens: int) -> str:
    """What mlx-lm says without any plugin."""
    model, tokenizer = load(str(MODEL))
    return "".join(piece.text for piece in stream_generate(model, tokenizer, prompt, max_tokens=tokens))


def test_the_plugin(tmp_path: Path):
    project = tmp_path / "project"
    project.mkdir()
    path = os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")]))
    instead = {"mlx-community/Qwen3-4B-Instruct-2507-4bit": str(MODEL), "pip install": "true"}
    text = document(600)
    prompt = text + text[:300]  # which the model goes on copying
    with reserved_port() as held, Reader(tmp_path, project, held.getsockname()[1], instead, PYTHONPATH=path) as reader:
        for block in PAGE:
            reader.do(block)
            if block.title == "pyproject.toml":
                install(project)
            if "--help" in block.text:
                assert "--shelf DIR" in reader.output
            if "--shelf ~/shelf" in block.text:
                serve = block
        answers = [reader.client.complete(prompt, max_tokens=48) for _ in range(2)]
        plain = reader.client.complete(prompt, max_tokens=48, num_draft_tokens=0)
        reader.do(serve)  # stops the one before
        answers.append(reader.client.complete(prompt, max_tokens=48))
        log = reader.log.read_text()
    assert {answer.text for answer in [*answers, plain]} == {expected(prompt, 48)}
    length = answers[0].prompt_tokens
    assert [answer.cached_tokens for answer in answers] == [0, length - 1, length - 1]
    assert all(answer.usage["speculation"]["accepted_tokens"] > 0 for answer in answers)
    assert "speculation" not in plain.usage or plain.usage["speculation"]["drafted_tokens"] == 0
    assert "Traceback" not in log and "WARNING" not in log
