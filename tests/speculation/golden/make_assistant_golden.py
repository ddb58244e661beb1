#!/usr/bin/env python3
"""Compute what Hugging Face transformers gives for the tests' assistants.

    python make_assistant_golden.py

Needs transformers 5.24, tokenizers and torch (the CPU's is enough), in an environment of
its own; mlx is not used. The artifacts are those of `assistants.py`, made of seeds, and the
trained pair of `tests/models`; they are loaded by transformers from their files, as a user's would be.

Writes `assistant.safetensors` beside this file: for each kind and number of tokens the
logits and the next hidden state of two drafts at the same position, as transformers'
candidate generator does it, in float32 (`single`) and in float64 (`double`). Both are given
the same numbers, also for the second draft: the first one's hidden state of `double`, rounded.
transformers computes norms and RoPE in float32 whatever the type; here `double` is float64 throughout.

For prompts beyond the window the sliding keys are given twice: whole, so that
transformers' own mask cuts them, and as the newest of them, so that it does not.

Writes `pair.safetensors`, too: the first tokens of an English text, and for prompts of so many of
them the trained target's and assistant's two drafts, each type from the tokens on.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

import assistants  # noqa: E402

LENGTHS = assistants.LENGTHS
MODELS = TESTS / "models"
TYPES = {"single": torch.float32, "double": torch.float64}


def main() -> None:
    made: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for kind in assistants.KINDS:
            directory = assistants.write(Path(scratch) / kind, assistants.config(kind), assistants.tensors(kind))
            for tokens in LENGTHS:
                for form in assistants.FORMS:
                    made |= {f"{kind}.{tokens}.{form}.{name}": array for name, array in random(kind, directory, tokens, form).items()}
        pair = trained()
    for name, arrays in {"assistant": made, "pair": pair}.items():
        file = HERE / f"{name}.safetensors"
        save_file(arrays, str(file), {"transformers": transformers.__version__, "torch": torch.__version__})
        file.chmod(0o644)
        apart = [np.abs(array - arrays[key.replace("single", "double")]).max() for key, array in arrays.items() if "single" in key]
        print(f"{file.name}: {len(arrays)} arrays; float32 is within {max(apart):.1e} of float64")


@contextmanager
def precision(name: str) -> Iterator[None]:
    """What transformers calls float is float64 within, where that is what is computed in."""
    single, cast = torch.float, torch.Tensor.float
    if name == "double":
        torch.float, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float, torch.Tensor.float = single, cast


def load(name: str, directory: Path, dtype: torch.dtype):
    model, loading = getattr(transformers, name).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    wrong = {what: names for what, names in loading.items() if names}
    if wrong:
        raise SystemExit(f"{directory.name}: {wrong}")
    return model.eval()


def random(kind: str, directory: Path, tokens: int, form: str) -> dict[str, np.ndarray]:
    """Two drafts of an assistant of random weights."""
    borrowed = assistants.read(kind, tokens, form)
    first, hidden, second = assistants.inputs()
    found: dict[str, np.ndarray] = {}
    for draft, embedded in enumerate((first, second)):
        for precise in ("double", "single"):
            with precision(precise):
                model = load(assistants.config(kind)["architectures"][0], directory, TYPES[precise])
                states = {name: tuple(torch.from_numpy(np.ascontiguousarray(side)).to(model.dtype) for side in pair) for name, pair in borrowed.items()}
                given = torch.cat([torch.from_numpy(array).to(model.dtype) for array in (embedded, hidden)], dim=-1)
                out = model(inputs_embeds=given, position_ids=torch.tensor([[tokens]]), shared_kv_states=states)
                found |= {f"{draft}.{precise}.logits": out.logits.numpy(), f"{draft}.{precise}.hidden": out.last_hidden_state.numpy()}
        hidden = found[f"{draft}.double.hidden"].astype(np.float32)
    return {name: np.array(array.astype(np.float32)) for name, array in found.items()}


def trained() -> dict[str, np.ndarray]:
    """Two drafts of the trained pair, behind so many tokens of a text."""
    text = runpy.run_path(str(TESTS.parent / "mlx_lm_tiered" / "bench" / "text.py"))["document"](4 * LENGTHS[-1])
    tokens = Tokenizer.from_file(str(MODELS / "tiny-gemma4_text" / "tokenizer.json")).encode(text, add_special_tokens=False).ids[: LENGTHS[-1] + 2]
    found: dict[str, np.ndarray] = {"tokens": np.array(tokens)}
    for precise, dtype in TYPES.items():
        with precision(precise):
            target = load("Gemma4ForCausalLM", MODELS / "tiny-gemma4_text", dtype)
            assistant = load("Gemma4AssistantForCausalLM", MODELS / "assistant-gemma4_text", dtype)
            window = assistant.config.get_text_config().sliding_window
            for length in LENGTHS:
                out = target.model(input_ids=torch.tensor([tokens[:length]]), use_cache=True, return_shared_kv_states=True)
                hidden, states = out.last_hidden_state[:, -1:], dict(out.shared_kv_states)
                states["sliding_attention"] = tuple(side[:, :, -window:] for side in states["sliding_attention"])
                for draft in range(2):
                    embedded = target.model.embed_tokens(torch.tensor([[tokens[length + draft]]]))
                    given = torch.cat([embedded, hidden], dim=-1)
                    drafted = assistant(inputs_embeds=given, position_ids=torch.tensor([[length]]), shared_kv_states=states)
                    hidden = drafted.last_hidden_state
                    for name, array in (("logits", drafted.logits), ("hidden", hidden)):
                        found[f"{length}.{draft}.{precise}.{name}"] = np.array(array.numpy().astype(np.float32))
    return found


if __name__ == "__main__":
    main()
