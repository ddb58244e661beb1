"""What the Metal text must keep to, and that its compiling would show a mistake."""

from __future__ import annotations

import re
from pathlib import Path

import metal
import mlx.core as mx
import pytest
from plain import affine

from mlx_lm_tiered.kernels import decode, source
from mlx_lm_tiered.kernels.layout import Layout
from mlx_lm_tiered.kernels.tuning import choose

BODIES = ("planes.body", "ordered.body", "decode.body", "blocks.body", "merge.body", "written.body", "unrotated.body")
SHAPE = affine(8, 64, 64, each=1, kv_heads=1, masked=True, scales=mx.bfloat16)
TYPES = r"(?:u8|u16|u32|uint\d?|int|long|float\d?|half\d?|bool|S|T|simdgroup_\w+|\w+<[^<>;]*>)"
POINTER = re.compile(rf"(?:\b(\w+)\s+)?(?:const\s+)?\b{TYPES}\s*[*&](?![&\w]*\s*\d)")
SPACES = {"LOCAL", "DEVICE", "SHARED"}


def test_every_pointer_names_its_address_space() -> None:
    """The stand-in cannot tell a pointer without one from a pointer to a thread's own memory; Metal can."""
    names = ("metal.inc", "metal.body", "common.inc", *BODIES)
    code = re.sub(r"//.*", "", "\n".join(source.text(name) for name in names))
    found = [(pointer[0], pointer[1]) for pointer in POINTER.finditer(code)]
    assert len(found) > 20 and [whole for whole, space in found if space not in SPACES] == []
    # clang lets such a cast change the address space.
    assert "*)" not in re.sub(r"//.*", "", source.text("metal.inc")) and not re.search(r"\((?!DEVICE)\w+ (?:const )?\w+\*\)", code)
    assert POINTER.search("FN void f(float* c)") and POINTER.search("(const u8*)kp") and POINTER.search("int f(const S &a)")


def test_no_variable_is_global_and_none_is_a_double() -> None:
    """Metal wants such variables in the constant address space, and has no doubles."""
    header = re.sub(r"//.*", "", source.text("metal.inc") + source.text("common.inc"))
    assert re.findall(r"^(?:static|const|constexpr)\b.*", header, re.MULTILINE) == []
    everything = header + re.sub(r"//.*", "", source.body("metal", *BODIES))
    assert not re.search(r"\bdouble\b|\d\.\d*(?![\df])(?:e-?\d+(?!f))?(?![\w.])", everything)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("template <int BITS, int E, int ALIGN> FN void fetch(LOCAL u32* raw, DEVICE const u8* row", "template <int BITS, int E, int ALIGN> FN void fetch(LOCAL u32* raw, LOCAL const u8* row", "no matching function"),
        ("DEVICE const S* kscales = ks", "LOCAL const S* kscales = ks", "cannot initialize a variable"),
        ("reinterpret_cast<DEVICE const uint2*>(from)", "reinterpret_cast<LOCAL const uint2*>(from)", "reinterpret_cast"),
        ("l[k] += shuffle_xor(", "l[k] += warp_shuffle_xor(", "undeclared"),
        ("BARRIER();", "__syncthreads();", "undeclared"),
    ],
)  # fmt: skip
def test_clang_finds_a_mistake(tmp_path: Path, right: str, wrong: str, says: str) -> None:
    text = metal.unit(list(metal.of(SHAPE)))
    assert right in text
    done = metal.compiled(text.replace(right, wrong), tmp_path, "-fsyntax-only")
    assert done.returncode != 0 and says in done.stderr


def test_mlx_writes_one_text_for_all_that_is_supported() -> None:
    """Arrays of fewer than 8 elements would come in another address space, in a kernel that no self-test has seen."""
    of = [[kernel.text for kernel in metal.of(SHAPE, slots, splits)] for slots, splits in ((8, 1), (4096, 64))]
    assert of[0] == of[1] != [kernel.text for kernel in metal.of(SHAPE, 7)]


def test_a_step_is_put_to_metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it that mlx does before a GPU's part begins."""
    monkeypatch.setattr(decode, "dialect", lambda: "metal")
    side = [mx.zeros((2, 1, 40, size), kind) for size, kind in ((32, mx.uint32), (2, mx.bfloat16), (2, mx.bfloat16))]
    turbo_side = [mx.zeros((2, 1, 40, size), kind) for size, kind in ((32, mx.uint32), (8, mx.float16), (12, mx.uint32), (4, mx.float16))]
    q, mask = mx.zeros((2, 4, 1, 128), mx.bfloat16), mx.ones((2, 1, 1, 40), mx.bool_)
    for layout, sides in ((Layout.affine(8, 64), [*side, *side]), (Layout.turboquant(8, 3), turbo_side)):
        shapes = []

        def step(q: mx.array, *sides: mx.array, layout: Layout = layout, shapes: list = shapes) -> mx.array:
            half = len(sides) // 2
            assert decode.supports(q, sides[:half], sides[half:], 40, layout, mask, None)
            out = decode.decode(q, sides[:half], sides[half:], 0.1, mask, layout)
            shapes.append((out.shape, out.dtype))
            return out

        mx.export_function(str(tmp_path / "step.mlxfn"), step, q, *sides)
        assert shapes == [((2, 4, 1, 128), mx.bfloat16)]


def test_what_a_threadgroup_may_have() -> None:
    cases = [(Layout.affine(4, group), dim) for group, dims in ((32, (32, 64, 96, 128, 192, 256)), (64, (64, 128, 256, 512)), (128, (128, 256))) for dim in dims]
    cases += [(Layout.turboquant(8, bits), dim) for bits in (2, 3, 4, 5, 8) for dim in (64, 128, 256, 512)]
    for layout, dim in cases:
        for each in (1, 4, 5, 8, 12):
            tuning = choose(4096, 2, dim, each, "metal")
            kinds = (mx.float32, mx.float16) if layout.turbo else (mx.float32, mx.float32)
            found = decode.options("metal", 1, 2, decode.Format(layout, dim, each, *kinds, 0.1), tuning)
            if decode.warps_that_fit("metal", decode.Format(layout, dim, each, *kinds, 0.1), 1) == 0:
                # No block has room for this; it is not supported.
                assert dim == 512 and each > 4
                continue
            warps, part, tiles = found.parts_constants["W"], min(dim, 256), 1 if each <= 4 else 2
            # As in decode.body: outputs and what belongs to them, queries, and the table.
            shared = warps * min(each, 8) * (part + 8 + 2) * 4 + (8 * tiles * 2 * (dim // 4 + 4) + 4 * tiles * (dim // layout.group_size + 1)) * 4 + layout.table_bytes
            assert found.parts["threadgroup"] == (32 * warps, 1, 1) and shared <= 32 << 10 and warps in (1, 2, 4)
            threads = found.merge["threadgroup"][0]
            assert threads <= 1024 and threads % 32 == 0 and (decode.MOST_SPLITS + threads) * 4 <= 32 << 10
